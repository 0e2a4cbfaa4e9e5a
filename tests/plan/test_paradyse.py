from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.plan.layerwise.paradyse import prepare
from lengthwise.plan.planner import Planner
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.problem import PricedBatch
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_batch, make_problem

SHARDED = (Method.MEGATRON_TS, Method.ULYSSES_Z, Method.METP)
LONGEST = 100
ROUNDING = 1e-9
"""Sums of the same few numbers in another order."""

batches = st.lists(st.integers(1, LONGEST), min_size=1, max_size=30)


class MethodCost(SimpleCost):
    """Of three methods, one is the fastest on short packs, one on long ones, one holds the most tokens."""

    def overhead_s(self, scheme):
        own = {Method.MEGATRON_TS: 0.1, Method.ULYSSES_Z: 0.4, Method.METP: 0.8}
        return float(np.mean([own.get(method, 0.1) for method in scheme.methods]))

    def max_tokens(self, scheme, *, num_devices):
        kept = {Method.MEGATRON_TS: 1.0, Method.ULYSSES_Z: 0.8, Method.METP: 0.3}
        flags = zip(scheme.methods, scheme.recompute)
        per_token = np.mean([kept.get(method, 1.0) * (0.4 if flag else 1.0) for method, flag in flags])
        return int(self.capacity * scheme.degree / per_token)


def problem_of(*, capacity=30, methods=SHARDED, **options):
    factors = {Method.MEGATRON_TS: 1.2, Method.ULYSSES_Z: 1.0, Method.METP: 1.3}
    options = {"num_layers": 6, "stages": [1], "max_length": LONGEST, "recomputed": (0, 6), **options}
    return make_problem(MethodCost(capacity=capacity, method_factors=factors), methods=methods, **options)


SCARCE = problem_of(num_devices=4, capacity=12)
"""Memory for the longest sequence under the leanest method alone."""


def schemes_run(plan):
    """Every micro-batch with its pipeline and its methods and recompute flags."""
    for pipeline in plan.pipelines:
        for micro_batch in pipeline.micro_batches:
            yield (
                micro_batch,
                micro_batch.methods or pipeline.scheme.methods,
                micro_batch.recompute or pipeline.scheme.recompute,
            )


@given(
    batches,
    st.integers(1, 7),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(8, 200),
    st.sampled_from([(objective, flag) for objective in Objective for flag in (False, True)]),
)
@settings(deadline=None, max_examples=examples(30))
def test_plans_compute_every_sequence_once_fit_and_respect_their_bound(
    lengths, num_devices, devices_per_node, capacity, charging
):
    problem = problem_of(
        capacity=capacity, num_devices=num_devices, devices_per_node=devices_per_node,
        objective=charging[0], overhead_per_sequence=charging[1],
    )  # fmt: skip
    whole_cluster = [candidate.max_tokens for candidate in problem.candidates if candidate.scheme.degree == num_devices]
    assume(max(whole_cluster) >= LONGEST)
    plan = Planner(policy="paradyse", problem=problem)(make_batch(lengths))
    assert plan.num_phases == 1
    assert len({pipeline.scheme for pipeline in plan.pipelines}) == 1
    assert 0 < plan.lower_bound_s <= plan.time_s


@given(batches)
@settings(deadline=None, max_examples=4)
def test_equal_batches_get_equal_plans(lengths):
    plans = [Planner(policy="paradyse", problem=problem_of(num_devices=4))(make_batch(lengths)) for _ in range(2)]
    assert plans[0].digest == plans[1].digest


@given(batches)
@settings(deadline=None, max_examples=examples(30))
def test_every_pack_runs_within_the_smoothing_of_the_fastest_mix_that_holds_it(lengths):
    policy = prepare(SCARCE)
    plan = Planner(policy="paradyse", problem=SCARCE)(make_batch(lengths))
    for micro_batch, methods, recompute in schemes_run(plan):
        holding = [
            candidate for candidate in policy.ladder.candidates if candidate.max_tokens >= micro_batch.pack.num_tokens
        ]
        least_s = min(candidate.cost.time_s(micro_batch.pack.lengths, candidate.scheme) for candidate in holding)
        assert (methods, recompute) in {(candidate.scheme.methods, candidate.scheme.recompute) for candidate in holding}
        assert micro_batch.time_s <= least_s * (1 + SCARCE.smoothing) * (1 + ROUNDING)


def test_steps_of_like_lengths_run_the_same_methods_whichever_is_barely_faster():
    """Of lengths on both sides of the one at which another mix becomes the fastest, one step each."""
    fastest = replace(SCARCE, smoothing=0.0)

    def runs(problem, lengths):
        plans = [Planner(policy="paradyse", problem=problem)(make_batch([length])) for length in lengths]
        return [(tuple(methods), tuple(recompute)) for plan in plans for _, methods, recompute in schemes_run(plan)]

    lengths = range(1, LONGEST + 1)
    every, steady = runs(fastest, lengths), runs(SCARCE, lengths)
    crossing = [length for length, (one, other) in enumerate(pairwise(every), 1) if one != other]
    assert crossing
    for length in crossing:
        pair = slice(length - 1, length + 1)
        alternating = [length, length + 1] * 4
        assert runs(SCARCE, alternating) == steady[pair] * 4  # whatever came before
    assert sum(a != b for a, b in pairwise(steady)) < len(crossing)


def test_long_packs_run_mixed_methods_and_short_ones_the_fast_one():
    problem = problem_of(num_devices=4, capacity=9, recomputed=(0,))
    plan = Planner(policy="paradyse", problem=problem)(make_batch([60, 1]))
    runs = {max(micro_batch.pack.lengths): set(methods) for micro_batch, methods, _ in schemes_run(plan)}
    assert len(runs[60]) > 1
    alone = Planner(policy="paradyse", problem=problem)(make_batch([1]))
    assert [set(methods) for _, methods, _ in schemes_run(alone)] == [{Method.MEGATRON_TS}]


def test_mixes_are_faster_than_whole_models_of_one_method():
    problem = problem_of(num_devices=4, capacity=9, recomputed=(0,))
    plan = Planner(policy="paradyse", problem=problem)(make_batch([60]))
    holding = [
        candidate for candidate in problem.candidates if candidate.scheme.degree == 4 and candidate.num_stages == 1
    ]
    holding = [candidate for candidate in holding if candidate.max_tokens >= 60]
    assert plan.pipelines[0].micro_batches[0].time_s < min(
        candidate.cost.time_s([60], candidate.scheme) for candidate in holding
    )


@pytest.mark.parametrize(
    ("num_devices", "devices_per_node", "degree"), [(8, 4, 4), (4, 8, 4), (6, 3, 3), (7, 4, 1), (12, 4, 4)]
)
def test_the_group_is_the_largest_of_a_node_that_tiles_the_cluster(num_devices, devices_per_node, degree):
    problem = problem_of(num_devices=num_devices, devices_per_node=devices_per_node, capacity=500)
    plan = Planner(policy="paradyse", problem=problem)(make_batch([50, 3, 20]))
    assert [pipeline.scheme.degree for pipeline in plan.pipelines] == [degree] * (num_devices // degree)


def test_the_group_grows_beyond_a_node_where_a_node_does_not_hold_the_longest_sequence():
    problem = problem_of(num_devices=8, devices_per_node=2, capacity=9, recomputed=(0,))
    assert prepare(problem).ladder.candidates[0].scheme.degree == 4


def test_sharded_weights_are_taken_where_the_pool_has_them():
    both = problem_of(num_devices=4, methods=(*SHARDED, Method.ULYSSES))
    assert {candidate.scheme.weights for candidate in prepare(both).ladder.candidates} == {WeightPlacement.SHARDED}
    whole = problem_of(num_devices=4, methods=(Method.ULYSSES, Method.RING))
    assert {candidate.scheme.weights for candidate in prepare(whole).ladder.candidates} == {WeightPlacement.WHOLE}


def test_packs_do_not_exceed_the_context_length():
    problem = problem_of(num_devices=2, capacity=1000)
    plan = Planner(policy="paradyse", problem=problem)(make_batch([40] * 20))
    assert max(micro_batch.pack.num_tokens for micro_batch, _, _ in schemes_run(plan)) <= LONGEST


def test_copies_share_the_work():
    problem = problem_of(num_devices=8, devices_per_node=2, capacity=100, max_length=300)
    plan = Planner(policy="paradyse", problem=problem)(make_batch(np.random.default_rng(0).integers(1, 100, 200)))
    assert plan.gap < 0.1


def test_a_run_whose_longest_sequence_no_group_holds_is_refused():
    problem = problem_of(num_devices=4, max_length=10_000)
    with pytest.raises(InfeasibleError, match=r"holds 10,000 tokens .* reach 1,000 tokens, at degrees"):
        prepare(problem)


def test_a_batch_with_a_longer_sequence_than_the_run_allows_is_refused():
    problem = problem_of(num_devices=4, max_length=100)
    with pytest.raises(InfeasibleError, match=r"sequence 11 \(9,999 tokens\) is longer than data.max_length \(100\)"):
        prepare(problem)(PricedBatch(problem, make_batch([5, 9999])))
