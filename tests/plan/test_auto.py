"""The product's default is never slower than any policy, under any cost model, and its bound holds for all of them."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.batch import attention_length
from lengthwise.core.cost import CostError
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.prefix_tree import ROOT, PrefixTree
from lengthwise.plan import auto, policies
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.space.draft_times import step_times_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.sim.engine import simulate
from tests.examples import examples
from tests.plan.costs import HiddenUpdates, SimpleCost, make_batch, make_problem

OTHERS = [name for name in POLICIES if name != "auto"]


@st.composite
def problems(draw):
    """Random costs, clusters and batches, with a sampled corpus that may or may not look like the batch."""
    cost = SimpleCost(
        a_s=draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        b_s=draw(st.sampled_from([1e-3, 1e-2, 1.0])),
        c_s=draw(st.sampled_from([0.0, 0.5, 20.0])),
        loss=draw(st.sampled_from([0.0, 0.1, 1.0])),
        capacity=draw(st.integers(30, 300)),
        method_factors={Method.RING: draw(st.sampled_from([0.8, 1.3]))},
    )
    num_devices = draw(st.integers(1, 6))
    lengths = st.lists(st.integers(1, 100), min_size=1, max_size=25)
    samples = draw(st.lists(lengths, max_size=3))
    problem = make_problem(
        HiddenUpdates(cost, slowdown=draw(st.sampled_from([0.0, 0.5]))) if draw(st.booleans()) else cost,
        num_devices=num_devices,
        devices_per_node=draw(st.sampled_from([2, 4, 8])) if num_devices % 4 == 0 else 8,
        methods=(Method.ULYSSES, Method.RING),
        recomputed=draw(st.sampled_from([(0,), (0, 4), (0, 2, 4)])),
        samples=samples,
        stages=[1, 2] if num_devices > 1 else [1],
    )
    longest = min(100, problem.leanest.max_tokens)
    return problem, [min(length, longest) for length in draw(lengths)]


def test_a_policy_that_fails_is_left_out_with_a_warning_and_one_that_refuses_without(monkeypatch):
    def prepare(name, problem):
        if name in ("hotspa", "dcp-inter"):
            raise RuntimeError("broken\nbadly") if name == "hotspa" else InfeasibleError("it does not fit")
        return policies.prepare(name, problem)

    monkeypatch.setattr(auto, "prepare_policy", prepare)
    problem = make_problem(SimpleCost(a_s=1e-4, b_s=1.0), num_devices=4)
    with pytest.warns(UserWarning) as caught:
        Planner(policy="auto", problem=problem)(make_batch([30, 20, 5])).check_covers(make_batch([30, 20, 5]))
    (warning,) = caught
    assert str(warning.message) == "policy auto goes on without policy hotspa, which fails: RuntimeError: broken"


@settings(max_examples=examples(12, fewest=4), deadline=None)
@given(problems())
def test_auto_is_never_slower_than_any_policy(case):
    problem, lengths = case
    batch = make_batch(lengths)
    best = Planner(policy="auto", problem=problem)(batch)
    for policy in OTHERS:
        try:
            other = Planner(policy=policy, problem=problem)(batch)
        except InfeasibleError:
            continue
        assert best.time_s <= other.time_s * (1 + 1e-8), policy
        assert best.lower_bound_s <= other.time_s * (1 + 1e-9), policy
        assert other.time_s == pytest.approx(simulate(other).step_time_s, rel=1e-12), policy
    assert best.time_s == pytest.approx(simulate(best).step_time_s, rel=1e-12)


@settings(max_examples=examples(20, fewest=4), deadline=None)
@given(problems(), st.sampled_from(["auto", "hydraulis"]))
def test_every_sequence_is_planned_once_within_memory_and_above_the_bound(case, policy):
    problem, lengths = case
    if (
        max(lengths) > max(k.max_tokens for k in problem.candidates if k.scheme.num_recomputed == 0)
        and policy != "auto"
    ):
        return
    batch = make_batch(lengths)
    plan = Planner(policy=policy, problem=problem)(batch)
    plan.check_covers(batch)
    assert 0 < plan.lower_bound_s <= plan.time_s
    capacity = problem.cost.capacity * 2**30
    assert all(m.peak_bytes <= capacity for pipeline in plan.pipelines for m in pipeline.micro_batches)
    assert plan.digest == Planner(policy=policy, problem=problem)(batch).digest


@settings(max_examples=examples(10, fewest=3), deadline=None)
@given(problems(), st.sampled_from(["auto", "hydraulis", "dcp-inter", "packed"]), st.randoms(use_true_random=False))
def test_units_are_priced_by_what_they_attend_to_and_above_their_bound(case, policy, random):
    problem, lengths = case
    batch = make_batch(lengths)
    units = replace(batch, attention_lengths=tuple(random.randint(1, length) for length in lengths))
    with suppress(InfeasibleError):
        plan, whole = (Planner(policy=policy, problem=problem)(asked) for asked in (units, batch))
        plan.check_covers(units)
        assert 0 < plan.lower_bound_s <= plan.time_s
        assert plan.lower_bound_s <= whole.time_s * (1 + 1e-9), "what attends to less takes no longer"
        assert plan.time_s == pytest.approx(simulate(plan).step_time_s, rel=1e-12)


def test_a_unit_takes_as_long_as_sequences_that_attend_as_far():
    """Two branches of 30 tokens after a prompt of 60: its 120 tokens attend as far as those of a sequence of 105."""
    tree = PrefixTree(bounds=(0, 60, 90, 120), parents=(ROOT, 0, 0), leaves=(1, 2))
    assert tree.num_pairs == 60 * 61 // 2 + 2 * (30 * 60 + 30 * 31 // 2)
    alike = attention_length(tree.num_slots, tree.num_pairs)
    assert alike == 105
    problem = make_problem(SimpleCost(a_s=1e-2, b_s=1.0), num_devices=1)
    candidate = problem.candidates[0]
    batch = replace(make_batch([120, 40]), attention_lengths=(alike, 40))
    times_s = PricedBatch(problem, batch).times_s(candidate)
    linear_s = SimpleCost(a_s=0.0, b_s=1.0).sequence_times_s([120], candidate.scheme)[0]
    squared_s = SimpleCost(a_s=1e-2, b_s=0.0).sequence_times_s([1], candidate.scheme)[0] * 2 * tree.num_pairs
    assert times_s[0] == pytest.approx(linear_s + squared_s, rel=0.01)
    assert times_s[1] == candidate.times_s(np.array([40]))[0]


def test_one_long_sequence_goes_first_on_all_devices_and_the_short_ones_after_it_on_one_each():
    cost = SimpleCost(a_s=1e-4, b_s=1e-4, c_s=0.0, loss=0.2, capacity=1000)
    lengths = [900, *[20] * 400]
    problem = make_problem(cost, num_devices=4, stages=[1], max_length=900, samples=[lengths] * 4)
    plan = Planner(policy="auto", problem=problem)(make_batch(lengths))
    assert plan.num_phases == 2
    degrees = [strategy.schemes[0].degree for strategy in plan.strategies]
    assert max(degrees) > min(degrees) == 1
    assert plan.gap < 0.05


def test_a_sequence_too_long_for_the_fastest_candidate_recomputes_as_few_layers_as_it_needs():
    problem = make_problem(
        SimpleCost(capacity=100),
        num_devices=1,
        num_layers=8,
        max_length=390,
        recomputed=tuple(range(9)),
        samples=[[50]],
    )
    plan = Planner(policy="auto", problem=problem)(make_batch([190, 50, 40, 5]))
    (pipeline,) = plan.pipelines
    for m in pipeline.micro_batches:
        flags = m.recompute or pipeline.scheme.recompute
        assert sum(flags) == (3 if 190 in m.pack.lengths else 0)  # 100 (1 + 3 r / 8) >= 190 from r = 3 on
    assert pipeline.micro_batches[0].pack.lengths == (190,)


def test_hydraulis_uses_heterogeneous_strategies_where_they_pay():
    cost = SimpleCost(a_s=0, b_s=1e-2, c_s=0.01, loss=0.5, capacity=30)
    rng = np.random.default_rng(0)
    samples = [np.append(rng.integers(2, 20, 200), 100) for _ in range(8)]
    problem = make_problem(cost, num_devices=8, stages=[1], samples=samples)
    plan = Planner(policy="hydraulis", problem=problem)(make_batch(samples[0]))
    assert len({scheme.degree for scheme in plan.strategies[0].schemes}) > 1
    assert plan.time_s < 0.9 * Planner(policy="static", problem=problem)(make_batch(samples[0])).time_s


def test_a_sequence_that_fits_nowhere_is_refused_with_the_number_the_limit_and_the_way_out():
    problem = make_problem(SimpleCost(capacity=100), num_devices=2, max_length=200)
    with pytest.raises(
        InfeasibleError, match=r"sequence 11 \(201 tokens\) needs .* GiB .* data.max_length=200 or less"
    ):
        Planner(policy="auto", problem=problem)(make_batch([5, 201]))


def test_equal_batches_priced_anew_get_equal_plans():
    problem = make_problem(num_devices=4, samples=[[30, 20, 10]] * 4)
    planner = Planner(policy="auto", problem=problem)
    first = planner(make_batch([70, 20, 10, 5]))
    planner(make_batch([3, 2, 1]))
    assert planner(make_batch([70, 20, 10, 5])).digest == first.digest


def test_what_other_policies_have_planned_of_a_batch_changes_nothing_but_the_work():
    problem = make_problem(num_devices=4, samples=[[30, 20, 10]] * 4)
    alone = Planner(policy="auto", problem=problem)(make_batch([70, 20, 10, 5]))
    priced = PricedBatch(problem, make_batch([70, 20, 10, 5]))
    plans = [Planner(policy=name, problem=problem).plan(priced) for name in ("packed", "hydraulis", "auto")]
    assert [plan.policy for plan in plans] == ["packed", "hydraulis", "auto"]
    assert plans[-1].digest == alone.digest


METHODS = (Method.ULYSSES, Method.RING, Method.MEGATRON_TS, Method.ULYSSES_Z)


def nested_problems(seed):
    """Problems of one method, two, three and four in some order, and lengths that all of them hold."""
    rng = np.random.default_rng(seed)
    cost = SimpleCost(
        a_s=rng.choice([0.0, 1e-4, 1e-2]),
        c_s=rng.choice([0.0, 0.05, 0.5]),
        loss=rng.choice([0.0, 0.1, 0.5]),
        capacity=int(rng.integers(30, 120)),
        method_factors={method: rng.choice([0.8, 0.9, 1.0, 1.2]) for method in METHODS},
    )
    order = [METHODS[k] for k in rng.permutation(len(METHODS))]
    options = {
        "num_devices": int(rng.choice([2, 4, 6])),
        "recomputed": [(0,), (0, 4)][rng.integers(2)],
        "stages": [1, 2],
        "samples": [np.minimum(rng.lognormal(3, 0.8, 12).astype(int) + 1, 100) for _ in range(3)],
    }
    problems = [make_problem(cost, methods=tuple(order[: k + 1]), **options) for k in range(len(order))]
    longest = min(100, *(problem.leanest.max_tokens for problem in problems))
    return problems, np.minimum(rng.lognormal(3, 1, int(rng.integers(3, 15))).astype(int) + 1, longest)


@pytest.mark.deep  # by default: tests/plan/test_larger_search_space.py
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 8), marks=pytest.mark.deep)])
def test_more_methods_make_hardly_any_step_slower_and_none_by_much(seeds):
    """Searches are not exhaustive, so that a larger space can end worse; what is found of fewer methods is tried."""
    ratios = []
    for seed in seeds:
        problems, lengths = nested_problems(seed)
        problems = problems if len(seeds) > 1 else problems[::2]  # two methods more each time
        times_s = [Planner(policy="auto", problem=problem)(make_batch(lengths.tolist())).time_s for problem in problems]
        ratios += [more_s / min(times_s[: k + 1]) for k, more_s in enumerate(times_s[1:])]
    assert max(ratios) < 1.01
    assert sum(ratio > 1 + 1e-9 for ratio in ratios) <= len(ratios) // 10


def test_a_pack_runs_by_the_method_that_is_fastest_for_it():
    """Which method is faster depends on the length; no ladder of both is faster at every length."""

    class Crossing(SimpleCost):
        def sequence_times_s(self, lengths, scheme):
            squared = scheme.methods[0] is Method.ULYSSES
            return np.asarray(lengths, dtype=float) ** (1.5 if squared else 1.0) * (1.0 if squared else 8.0)

    problem = make_problem(
        Crossing(capacity=100), num_devices=2, degrees=[2], stages=[1], methods=(Method.ULYSSES, Method.RING)
    )
    plan = Planner(policy="auto", problem=problem)(make_batch([100, 9, 90, 16, 100]))
    for pipeline in plan.pipelines:
        for m in pipeline.micro_batches:
            times_s = {k.scheme.methods[0]: k.times_s(np.array(m.pack.lengths)).sum() for k in problem.candidates}
            assert set(pipeline.methods_of(m)) == {min(times_s, key=times_s.get)}


@dataclass(frozen=True)
class MeasuredCost(SimpleCost):
    """Measured costs, of which half of the ratios are off by more than ``of_ratios``."""

    of_ratios: float = 0.0

    @property
    def error(self):
        return CostError(of_times=2 * self.of_ratios, of_ratios=self.of_ratios)


LONG_AND_SHORT = [900, *[20] * 400]
"""Lengths that a plan of two phases computes fastest."""


def planned_with_error(of_ratios, policy="auto"):
    cost = MeasuredCost(a_s=1e-4, b_s=1e-4, c_s=0.0, loss=0.2, capacity=1000, of_ratios=of_ratios)
    problem = make_problem(cost, num_devices=4, stages=[1], max_length=900, samples=[LONG_AND_SHORT] * 4)
    return Planner(policy=policy, problem=problem)(make_batch(LONG_AND_SHORT))


def test_a_gain_within_the_error_of_measured_costs_leaves_no_simpler_plan():
    exact, simple = planned_with_error(0.0), planned_with_error(0.5)
    assert exact.num_phases == 2 and simple.num_phases == 1
    gain, shared = simple.time_s / exact.time_s - 1, work_in_common(exact, simple)
    assert gain > 0 and 0.5 < shared < 0.95, "some of their work is done alike"
    assert planned_with_error(0.99 * gain / (1 - shared)).num_phases == 2
    assert planned_with_error(1.01 * gain / (1 - shared)).num_phases == 1


def work_in_common(*plans):
    """The part of the device-seconds of two plans that pipelines of one degree compute in both."""
    shares = []
    for plan in plans:
        work = Counter()
        for pipeline in plan.pipelines:
            work[pipeline.scheme.degree] += pipeline.scheme.degree * sum(m.time_s for m in pipeline.micro_batches)
        shares.append({degree: seconds / sum(work.values()) for degree, seconds in work.items()})
    first, second = shares
    return sum(min(share, second.get(degree, 0.0)) for degree, share in first.items())


def test_of_plans_that_compute_everything_alike_the_faster_is_taken_whatever_the_error():
    cost = MeasuredCost(a_s=0.0, b_s=1e-2, c_s=0.5, loss=0.2, capacity=100, of_ratios=0.9)
    problem = make_problem(cost, num_devices=2, degrees=[1], stages=[1], samples=[[90, 50, 40, 10]] * 4)
    plan = Planner(policy="auto", problem=problem)(make_batch([90, 50, 40, 10]))
    assert {pipeline.scheme.degree for pipeline in plan.pipelines} == {1}
    assert plan.time_s == pytest.approx(0.25 + 0.5 + 1.0), "two packs of a hundred tokens"


@settings(max_examples=examples(12, fewest=3), deadline=None)
@given(problems(), st.sampled_from([0.02, 0.1, 0.5]))
def test_auto_is_slower_than_a_policy_by_no_more_than_the_error_of_measured_costs(case, of_ratios):
    problem, lengths = case
    fields = {name: getattr(problem.cost, name) for name in SimpleCost.__dataclass_fields__}
    cost = MeasuredCost(**fields, of_ratios=of_ratios)
    problem = replace(problem, candidates=tuple(replace(k, cost=cost) for k in problem.candidates))
    best = Planner(policy="auto", problem=problem)(make_batch(lengths))
    for policy in OTHERS:
        with suppress(InfeasibleError):
            other = Planner(policy=policy, problem=problem)(make_batch(lengths))
            assert best.time_s <= other.time_s * (1 + of_ratios) * (1 + 1e-8), policy


def test_equal_pipelines_that_others_were_tuned_to_are_strategies_whose_packs_it_deals_itself():
    problem = make_problem(num_devices=4, samples=[np.array([90, 40, 30, 20, 10] * 4)])
    tuned = policies.prepare("static", problem).candidate
    strategies = policies.prepare("auto", problem).strategy_candidates.strategies
    assert any([tile.candidate for tile in strategy.tiles] == [tuned] for strategy in strategies)


class WithoutUpdates(SimpleCost):
    """Costs of micro-batches alone."""

    def update_s(self, strategy):
        return 0.0


class Noting:
    """A policy that cannot win, and notes that it was asked."""

    def __init__(self):
        self.num_asked = 0

    def floor_s(self, priced):
        self.num_asked += 1
        return np.inf


@pytest.mark.parametrize(("scale", "is_worth"), [(1e-3, False), (1.0, True)])
def test_where_training_waits_other_policies_are_tried_only_for_a_gain_worth_their_time(scale, is_worth):
    """The same steps in milliseconds and in seconds, further from their bound than what is always enough."""
    cost = WithoutUpdates(a_s=1e-4 * scale, b_s=1e-2 * scale, c_s=0.5 * scale)
    lengths, other = [80, 80, 80, 80], Noting()
    problem = replace(make_problem(cost, num_devices=3, stages=(1,), samples=[lengths]), is_waited_for=True)
    policy = auto.prepare(problem)
    policy.others = {"other": other}
    draft = policy(PricedBatch(problem, make_batch(lengths)))
    assert sum(step_times_s(PricedBatch(problem, make_batch(lengths)), draft)) > 1.02 * draft.lower_bound_s
    assert bool(other.num_asked) == is_worth
