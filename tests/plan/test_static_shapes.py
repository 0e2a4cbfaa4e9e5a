"""Micro-batches of a few sizes: each is filled up, fits, is priced with what fills it, and divides by its degree."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.size_buckets import MULTIPLE
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.static_shapes import share_sizes, with_shapes
from tests.plan.costs import make_batch, make_problem

MOST = 3
RNG = np.random.default_rng(3)
SAMPLES = [RNG.integers(1, 700, 20) for _ in range(4)]


def micro_batches_of(plan):
    return [(pipeline, m) for pipeline in plan.pipelines for m in pipeline.micro_batches]


def planners(policy, **options):
    problem = make_problem(max_length=700, samples=SAMPLES, num_devices=2, degrees=[1, 2], stages=[1], **options)
    free = Planner(policy=policy, problem=problem)
    return free, with_shapes(free, MOST)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_micro_batch_has_a_size_of_the_lattice_and_fits_with_its_filler(policy):
    _, shaped = planners(policy, recomputed=(0, 4))
    sizes = shaped.problem.lattice.sizes
    assert len(sizes) <= MOST and all(size % (2 * MULTIPLE) == 0 for size in sizes)
    for seed in range(3):
        batch = make_batch(np.random.default_rng(seed).integers(1, 701, 25), step=seed)
        plan = shaped(batch)  # covers the batch, or raises
        for pipeline, m in micro_batches_of(plan):
            assert m.pack.num_tokens in sizes
            assert m.pack.num_tokens % pipeline.scheme.degree == 0
            assert m.pack.num_tokens // pipeline.scheme.degree in share_sizes(shaped.problem)
            assert m.peak_bytes <= shaped.problem.memory_bytes
        computed = sum(m.pack.num_tokens for _, m in micro_batches_of(plan))
        assert plan.padding_fraction == pytest.approx(1 - batch.num_tokens / computed)
        assert plan.lower_bound_s <= plan.time_s
        assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_fillers_seconds_are_those_of_its_sequences():
    _, shaped = planners("packed", recomputed=(0,))
    cost = shaped.problem.cost
    filled = 0
    for pipeline, m in micro_batches_of(shaped(make_batch([600, 500, 90, 40]))):
        filled += m.pack.filler
        assert max(m.pack.computed_lengths) == max(m.pack.lengths)
        assert m.time_s == pytest.approx(cost.time_s(m.pack.computed_lengths, pipeline.scheme))
    assert filled


def test_padded_micro_batches_are_filled_up_too():
    _, shaped = planners("padded")
    found = [m.pack for _, m in micro_batches_of(shaped(make_batch([600, 500, 90, 40, 33])))]
    assert all(pack.padded_to for pack in found) and any(pack.filler for pack in found)
    assert {pack.num_tokens for pack in found} <= set(shaped.problem.lattice.sizes)


@pytest.mark.deep
def test_auto_is_not_slower_than_any_policy_with_what_fills_packs_counted():
    shaped = {name: planners(name, recomputed=(0, 4))[1] for name in ("auto", "packed", "static", "bucket")}
    problem = shaped["auto"].problem
    for seed in range(3):
        batch = make_batch(np.random.default_rng(seed).integers(1, 701, 25), step=seed)
        times = {name: replace(one, problem=problem)(batch).time_s for name, one in shaped.items()}
        assert times["auto"] <= min(times.values()) * (1 + 1e-9)


def test_the_choice_is_the_same_on_every_rank():
    first, second = (planners("packed")[1].problem.lattice for _ in range(2))
    assert first == second


def test_a_sequence_longer_than_the_largest_size_is_refused_by_number_and_limit():
    _, shaped = planners("packed")
    largest = shaped.problem.lattice.sizes[-1]
    with pytest.raises(
        InfeasibleError, match=rf"sequence 10 \({largest + 1:,} tokens\) exceeds the largest size"
    ) as error:
        shaped(make_batch([largest + 1]))
    assert "Leave plan.shapes out" in str(error.value) and "plan.recompute" not in str(error.value)


def test_a_limit_below_the_longest_sequence_rounded_up_is_refused():
    problem = make_problem(max_length=700, samples=SAMPLES, num_devices=1, token_limit=701)
    with pytest.raises(InfeasibleError, match=r"takes 704, and a micro-batch holds 640 at most"):
        with_shapes(Planner(policy="packed", problem=problem), MOST)
