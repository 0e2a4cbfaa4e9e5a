from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.plan.dcp.dcp import prepare_inter, prepare_intra
from lengthwise.plan.dcp.deal_buckets import evenly
from lengthwise.plan.dcp.device_groups import Demand, GroupPlanner, Tiling
from lengthwise.plan.planner import Planner
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_batch, make_problem

POLICIES = pytest.mark.parametrize("policy", ["dcp-inter", "dcp-intra"])
LONGEST = 100

batches = st.lists(st.integers(1, LONGEST), min_size=1, max_size=40)


def problem_of(*, capacity=60, switch_s=0.125, c_s=0.5, loss=0.1, samples=(), **options):
    class Cost(SimpleCost):
        def switch_s(self, before, after):
            return 0.0 if before == after else switch_s

    options = {"max_length": LONGEST, "recomputed": (0, 2, 4), "samples": samples, **options}
    return make_problem(Cost(capacity=capacity, c_s=c_s, loss=loss), **options)


def holds_the_longest(problem):
    whole = [candidate for candidate in problem.candidates if candidate.num_stages == 1]
    return max(candidate.max_tokens for candidate in whole) >= LONGEST


@POLICIES
@given(
    batches,
    st.integers(1, 7),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(20, 300),
    st.sampled_from(list(product(Objective, (False, True)))),
)
@settings(deadline=None, max_examples=examples(60))
def test_plans_compute_every_sequence_once_fit_and_respect_their_bound(
    policy, lengths, num_devices, devices_per_node, capacity, charging
):
    objective, per_sequence = charging
    problem = problem_of(
        capacity=capacity, num_devices=num_devices, devices_per_node=devices_per_node, samples=[lengths],
        objective=objective, overhead_per_sequence=per_sequence,
    )  # fmt: skip
    assume(holds_the_longest(problem))
    plan = Planner(policy=policy, problem=problem)(make_batch(lengths))
    assert plan.num_devices == num_devices
    assert all(pipeline.scheme.num_stages == 1 for pipeline in plan.pipelines)
    assert 0 < plan.lower_bound_s <= plan.time_s


@pytest.mark.first_cells(1)
@POLICIES
@given(batches, st.integers(1, 7))
@settings(deadline=None, max_examples=examples(20))
def test_equal_batches_get_equal_plans(policy, lengths, num_devices):
    def plan():
        problem = problem_of(num_devices=num_devices, samples=[lengths])
        return Planner(policy=policy, problem=problem)(make_batch(lengths))

    assert plan().digest == plan().digest


@given(batches, st.integers(2, 7))
@settings(deadline=None, max_examples=examples(40))
def test_intra_recomputes_the_fewest_layers_each_micro_batch_allows(lengths, num_devices):
    problem = problem_of(num_devices=num_devices, samples=[lengths])
    plan = Planner(policy="dcp-intra", problem=problem)(make_batch(lengths))
    for pipeline in plan.pipelines:
        family = [
            candidate
            for candidate in problem.candidates
            if candidate.scheme.stage_layers == pipeline.scheme.stage_layers
        ]
        family = [candidate for candidate in family if candidate.scheme.degree == pipeline.scheme.degree]
        every_level = [family[0].recomputing(layers) for layers in range(family[0].scheme.num_layers + 1)]
        for micro_batch in pipeline.micro_batches:
            recompute = pipeline.scheme.recompute if micro_batch.recompute is None else micro_batch.recompute
            fitting = [candidate for candidate in every_level if candidate.max_tokens >= micro_batch.pack.num_tokens]
            assert sum(recompute) == min(candidate.scheme.num_recomputed for candidate in fitting)


@given(batches, st.integers(1, 7))
@settings(deadline=None, max_examples=examples(40))
def test_inter_recomputes_everywhere_what_the_longest_sequence_of_the_run_needs(lengths, num_devices):
    problem = problem_of(num_devices=num_devices, samples=[lengths])
    plan = Planner(policy="dcp-inter", problem=problem)(make_batch(lengths))
    single = [candidate for candidate in problem.candidates if candidate.num_stages == 1]
    fewest = min(candidate.scheme.num_recomputed for candidate in single if candidate.max_tokens >= LONGEST)
    for pipeline in plan.pipelines:
        assert pipeline.scheme.num_recomputed == fewest
        assert all(micro_batch.recompute is None for micro_batch in pipeline.micro_batches)


@POLICIES
@given(batches, st.integers(1, 7))
@settings(deadline=None, max_examples=examples(40))
def test_a_micro_batch_is_of_one_bucket(policy, lengths, num_devices):
    problem = problem_of(num_devices=num_devices, samples=[lengths])
    bucketed = {"dcp-inter": prepare_inter, "dcp-intra": prepare_intra}[policy](problem)
    priced = PricedBatch(problem, make_batch(lengths))
    for pipeline in (pipeline for phase in bucketed.phases(priced) for pipeline in phase):
        for pack in pipeline.packs:
            assert len(set(bucketed.buckets.of(priced.lengths[list(pack)]).tolist())) == 1


def test_where_buckets_do_not_fit_side_by_side_the_step_has_phases():
    lengths = [100] + [10] * 40
    options = {"capacity": 25, "num_devices": 4, "recomputed": (0,), "c_s": 0.01, "loss": 0.5}
    plan = Planner(policy="dcp-inter", problem=problem_of(**options))(make_batch(lengths))
    assert [[scheme.degree for scheme in strategy.schemes] for strategy in plan.strategies] == [[4], [1, 1, 1, 1]]
    slow = Planner(policy="dcp-inter", problem=problem_of(switch_s=1e3, **options))(make_batch(lengths))
    assert [[scheme.degree for scheme in strategy.schemes] for strategy in slow.strategies] == [[4]]
    assert plan.time_s < slow.time_s


def test_groups_of_the_long_sequences_fill_their_time_with_short_ones():
    problem = problem_of(capacity=50, num_devices=4, recomputed=(0,), switch_s=1e3, c_s=0.01)
    plan = Planner(policy="dcp-inter", problem=problem)(make_batch([100, 100] + [20] * 60))
    largest = max(plan.pipelines, key=lambda pipeline: pipeline.scheme.degree)
    computed = {length for micro_batch in largest.micro_batches for length in micro_batch.pack.lengths}
    assert computed == {100, 20}


@POLICIES
def test_long_tailed_batches_end_within_a_tenth_of_the_bound(policy):
    generator = np.random.default_rng(0)

    def lengths():
        return np.clip(generator.lognormal(6.2, 1.1, 250), 16, 32_768).astype(int)

    cost = SimpleCost(a_s=5e-9, b_s=3e-4, c_s=0.03, capacity=4096, loss=0.08)
    problem = make_problem(
        cost, num_devices=64, num_layers=32, recomputed=(0, 16, 32), max_length=32_768, samples=[lengths()]
    )
    planner = Planner(policy=policy, problem=problem)
    assert np.mean([planner(make_batch(lengths(), step)).gap for step in range(4)]) < 0.1


def test_several_phases_are_taken_only_if_they_are_faster():
    policy = prepare_intra(problem_of(capacity=25, num_devices=4))
    generator = np.random.default_rng(1)
    for _ in range(10):
        priced = PricedBatch(policy.problem, make_batch(generator.integers(1, LONGEST, 30)))
        chosen = policy(priced)
        assert len(chosen.phases) == 1 or time_s(priced, chosen) < policy_in_one_phase(policy, priced)


def policy_in_one_phase(policy, priced):
    dear = problem_of(capacity=25, num_devices=4, switch_s=1e6)
    alone = PricedBatch(dear, priced.batch)
    return time_s(alone, prepare_intra(dear)(alone))


@POLICIES
def test_whole_weights_are_taken_where_they_hold_the_longest_sequence(policy):
    methods = (Method.ULYSSES, Method.ULYSSES_Z)
    problem = problem_of(num_devices=4, methods=methods)
    plan = Planner(policy=policy, problem=problem)(make_batch([100, 5, 7]))
    assert {pipeline.scheme.weights for pipeline in plan.pipelines} == {WeightPlacement.WHOLE}
    sharded = problem_of(num_devices=4, methods=(Method.ULYSSES_Z,), degrees=[2, 4])
    plan = Planner(policy=policy, problem=sharded)(make_batch([100, 5, 7]))
    assert {pipeline.scheme.weights for pipeline in plan.pipelines} == {WeightPlacement.SHARDED}


@POLICIES
def test_a_run_whose_longest_sequence_fits_no_group_is_refused(policy):
    with pytest.raises(InfeasibleError, match=r"hold 1,000 tokens and tile 4 devices .* reach 960 tokens"):
        Planner(policy=policy, problem=problem_of(num_devices=4, max_length=1000))(make_batch([5]))


@POLICIES
def test_a_model_that_no_single_stage_holds_is_refused_in_words(policy):
    problem = problem_of(num_devices=4, stages=[2])
    with pytest.raises(InfeasibleError, match=r"no scheme of one stage holds the model's state\. Allow"):
        Planner(policy=policy, problem=problem)(make_batch([5]))


@POLICIES
def test_degrees_that_cannot_tile_the_cluster_are_refused(policy):
    with pytest.raises(InfeasibleError, match=r"tile 5 devices"):
        Planner(policy=policy, problem=problem_of(num_devices=5, degrees=[2, 4]))(make_batch([5]))


@given(st.sets(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 12))
def test_groups_tile_every_cluster_that_can_be_tiled(degrees, num_devices):
    degrees = sorted(degrees)
    tiling = Tiling(degrees, num_devices)
    counts = product(*(range(num_devices // degree + 1) for degree in degrees))
    possible = any(sum(n * p for n, p in zip(held, degrees)) == num_devices for held in counts)
    assert any(tiling.holds(degree) for degree in degrees) == possible
    if possible:
        types = tiling.fill(num_devices, range(len(degrees))[::-1])
        assert sum(degrees[candidate] for candidate in types) == num_devices


def test_buckets_get_the_groups_that_end_together():
    # Two buckets that fit one degree each: 6 sequences of 1 s on pairs, 12 of 0.5 s on single devices.
    demand = Demand(
        counts=np.array([6, 12]),
        time_s=np.array([[9.0, 0.5], [1.0, 0.4]]),
        overhead_s=np.zeros((2, 2)),
        alone_s=np.array([[np.inf, 0.5], [1.0, 0.4]]),
        batch_sizes=np.array([[0, 1], [1, 1]]),
    )
    deadline_s, groups = GroupPlanner(demand, Tiling([1, 2], 9)).earliest
    assert groups == (3, 3)
    assert deadline_s == pytest.approx(2.0, rel=1e-2)


@given(st.integers(1, 50), st.integers(1, 9))
def test_micro_batches_of_a_share_are_the_fewest_and_even(count, most):
    packs = evenly(range(count), most)
    assert [item for pack in packs for item in pack] == list(range(count))
    assert len(packs) == -(-count // most)
    assert max(map(len, packs)) - min(map(len, packs)) <= 1
