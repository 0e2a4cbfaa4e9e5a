"""Length ranges, their strategies, and switches between them."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.solve.segments import best_segmentations
from lengthwise.plan.space.draft_plan import DraftPlan
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.uniform.hotspa import ROUNDS, HotSpaPolicy
from lengthwise.plan.uniform.length_ranges import LengthRange, RangeStrategy, estimates_s, propose_ranges
from lengthwise.plan.uniform.tune import tuning_batches
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_batch, make_problem

SKEWED = [400, *[10] * 60]
"""One long sequence that only a high degree holds, and many short ones that prefer a low one."""


def skewed_problem(**options):
    cost = SimpleCost(capacity=100, loss=0.5, c_s=0.01)
    return make_problem(cost, max_length=400, stages=[1], samples=[SKEWED] * 2, **options)


def candidate_of(problem, degree):
    return next(
        candidate for candidate in problem.candidates if (candidate.scheme.degree, candidate.num_stages) == (degree, 1)
    )


def two_ranges(problem):
    ranges = (
        LengthRange(mode=RangeStrategy(candidate=candidate_of(problem, 1)), up_to=100),
        LengthRange(mode=RangeStrategy(candidate=candidate_of(problem, 4)), up_to=400),
    )
    return HotSpaPolicy(problem=problem, ranges=ranges)


def mean_s(policy, batches):
    return np.mean([time_s(batch, DraftPlan(phases=policy.phases(batch))) for batch in batches])


def test_long_and_short_sequences_get_strategies_of_their_own():
    problem = skewed_problem()
    plan = Planner(policy="hotspa", problem=problem)(make_batch(SKEWED))
    degrees = [{scheme.degree for scheme in strategy.schemes} for strategy in plan.strategies]
    assert degrees == [{1}, {4}]
    by_phase = {pipeline.phase: [m.pack.lengths for m in pipeline.micro_batches] for pipeline in plan.pipelines}
    assert by_phase[1] == [(400,)]
    assert plan.switch_s == 0.125


def test_a_sequence_is_computed_in_the_phase_of_its_length():
    problem = skewed_problem()
    lengths = [100, 101, 400, 1, 99]
    short, long = two_ranges(problem).phases(PricedBatch(problem, make_batch(lengths)))
    assert sorted(lengths[at] for pipeline in short for pack in pipeline.packs for at in pack) == [1, 99, 100]
    assert sorted(lengths[at] for pipeline in long for pack in pipeline.packs for at in pack) == [101, 400]


def test_a_range_without_sequences_is_skipped_and_costs_no_switch():
    problem = skewed_problem()
    plan = Planner(policy="hotspa", problem=problem)(make_batch([10] * 8))
    assert plan.num_phases == 1
    assert plan.switch_s == 0.0


def test_switches_that_cost_more_than_they_save_are_not_made():
    class SlowSwitch(SimpleCost):
        def switch_s(self, before, after):
            return 0.0 if before == after else 1e3

    cost = SlowSwitch(capacity=100, loss=0.5, c_s=0.01)
    problem = make_problem(cost, max_length=400, stages=[1], samples=[SKEWED])
    assert len(prepare("hotspa", problem).ranges) == 1


@settings(max_examples=examples(20), deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=20), min_size=1, max_size=3),
    num_devices=st.sampled_from([1, 4, 6]),
    capacity=st.integers(40, 400),
    loss=st.sampled_from([0.02, 0.5]),
)
def test_no_single_strategy_is_faster_on_the_samples(samples, num_devices, capacity, loss):
    problem = make_problem(
        SimpleCost(capacity=capacity, loss=loss), num_devices=num_devices, samples=samples, recomputed=(0, 4)
    )
    batches = tuning_batches(problem)
    every = [
        HotSpaPolicy(
            problem=problem, ranges=(LengthRange(mode=RangeStrategy(candidate=candidate, rounds=rounds), up_to=100),)
        )
        for candidate in problem.candidates
        if candidate.max_tokens >= 100
        for rounds in (ROUNDS if candidate.num_stages > 1 else (1,))
    ]
    assert mean_s(prepare("hotspa", problem), batches) <= min(mean_s(policy, batches) for policy in every) * (1 + 1e-9)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_floor_and_bound_are_below_the_time(lengths):
    problem = skewed_problem()
    policy, priced = two_ranges(problem), PricedBatch(problem, make_batch(lengths))
    took_s = time_s(priced, DraftPlan(phases=policy.phases(priced)))
    assert policy.floor_s(priced) <= took_s * (1 + 1e-9)
    assert policy.bound_s(priced) <= took_s * (1 + 1e-9)


def test_a_proposed_range_never_holds_more_than_its_strategy_fits():
    problem = skewed_problem()
    modes = [RangeStrategy(candidate=candidate) for candidate in problem.candidates]
    proposals = propose_ranges(problem, modes, tuning_batches(problem))
    assert any(len(ranges) > 1 for ranges in proposals)
    for ranges in proposals:
        assert ranges[-1].up_to == 400
        assert all(held.up_to <= held.mode.candidate.max_tokens for held in ranges)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_estimate_of_balanced_sequences_is_their_time(stages):
    problem = make_problem(degrees=[1], stages=[stages])
    priced = PricedBatch(problem, make_batch([20] * 16 + [50] * 8))
    mode = RangeStrategy(candidate=problem.candidates[0], rounds=stages)
    edges = np.array([0, 20, 100])
    estimated_s = estimates_s(priced.problem, [mode], edges, [priced])[0]
    for (i, low), (j, high) in combinations(enumerate(edges.tolist()), 2):
        lengths = [length for length in priced.lengths.tolist() if low < length <= high]
        part = PricedBatch(problem, make_batch(lengths))
        policy = HotSpaPolicy(problem=problem, ranges=(LengthRange(mode=mode, up_to=100),))
        took_s = time_s(part, DraftPlan(phases=policy.phases(part))) - 0.25
        if len(set(lengths)) == 1:
            assert estimated_s[i, j] == pytest.approx(took_s, rel=1e-9)
        else:  # lengths that differ are not balanced perfectly
            assert estimated_s[i, j] <= took_s * (1 + 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 5), st.integers(1, 3))
def test_the_cheapest_segmentation_is_that_of_trying_all(seed, num_candidates, num_points, most):
    rng = np.random.default_rng(seed)
    cost = rng.uniform(1, 10, (num_candidates, num_points, num_points))
    change, weight = rng.uniform(0, 5, (num_candidates, num_candidates)), rng.uniform(0, 1, (num_points, num_points))
    np.fill_diagonal(change, np.inf)
    value, segments = best_segmentations(cost, change, weight, max_segments=most)[0]

    def price(candidates, cuts):
        points = [0, *cuts, num_points - 1]
        total = sum(cost[candidate, a, b] for candidate, a, b in zip(candidates, points, points[1:]))
        changes = zip(candidates, candidates[1:], points[1:], points[2:])
        return total + sum(change[k, n] * weight[a, b] for k, n, a, b in changes)

    every = [
        price(candidates, cuts)
        for count in range(1, min(most, num_points - 1) + 1)
        for candidates in product(range(num_candidates), repeat=count)
        if all(k != n for k, n in pairwise(candidates))
        for cuts in combinations(range(1, num_points - 1), count - 1)
    ]
    assert value == pytest.approx(min(every))
    assert price([candidate for candidate, _, _ in segments], [end for _, _, end in segments[:-1]]) == pytest.approx(
        value
    )
