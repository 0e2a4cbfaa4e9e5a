"""Plans that may have sequences whole on one rank of a stage: never slower, within their bound, and as executed."""

from functools import cache

import numpy as np
import pytest

import lengthwise
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.token_placement import share_sizes
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.sim.engine import simulate


@cache
def plans_of(local, count, max_stages):
    """Of a step of so many of the sequences."""
    options = {"model": "llama-7b", "cluster": "1x8xL40S-48GB", "methods": ["ring"], "steps": 1}
    tokens = int(sum(LENGTHS[:count]))
    return lengthwise.plan(
        LENGTHS[:count], local_sequences=local, tokens_per_step=tokens, max_stages=max_stages, **options
    )


def placed(plan):
    return [(p, m) for p in plan.pipelines for m in p.micro_batches if m.placement]


LENGTHS = [60_000, *np.minimum(synthetic_lengths("commoncrawl", 200, seed=1), 8192).tolist()]


@pytest.mark.parametrize(
    ("stages", "count"),
    [(1, len(LENGTHS)), *(pytest.param(2, count, marks=pytest.mark.deep) for count in (81, len(LENGTHS)))],
)
def test_plans_are_no_slower_and_micro_batches_are_placed_where_that_is_faster(stages, count):
    (before,), (after,) = (plans_of(local, count, stages) for local in (False, True))
    assert not placed(before) and before.lower_bound_s <= before.time_s
    assert after.time_s <= before.time_s * (1 + 1e-9) and after.lower_bound_s <= after.time_s
    if stages == 1:
        assert placed(after) and after.time_s < before.time_s / 1.1
    assert StepPlan.from_json(after.to_json()) == after
    assert simulate(after).step_time_s == pytest.approx(after.time_s, rel=0.05)


def test_memory_counts_the_fullest_rank():
    (plan,) = plans_of(True, len(LENGTHS), 1)
    for pipeline, micro_batch in placed(plan):
        sizes = share_sizes(micro_batch.pack.lengths, micro_batch.placement, pipeline.scheme.degree)
        assert max(sizes) * pipeline.scheme.degree <= 1.02 * micro_batch.pack.num_tokens
        alike = [
            m for _, m in placed(plan) if m.recompute == micro_batch.recompute and m.methods == micro_batch.methods
        ]
        assert max(alike, key=lambda m: m.peak_bytes).peak_bytes >= micro_batch.peak_bytes
