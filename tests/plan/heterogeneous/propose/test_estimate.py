import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.plan.heterogeneous.propose.estimate import DEADLINE_RATIO, Estimator
from lengthwise.plan.heterogeneous.propose.planned import PlannedSteps, price_steps
from lengthwise.plan.heterogeneous.propose.tiling import Tiler, strategy_of
from lengthwise.plan.solve.shop import Objective
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem
from tests.plan.propose.workloads import counts_of, problems, workload_of

LOW = {Objective.FLOW_SHOP: 0.7, Objective.MAX_TIMES_COUNT: 0.4}
HIGH = 1.1
"""Estimates over plans: sequences are not divisible, which matters where a step has a handful of them; most of all
where one more micro-batch counts as much as the longest."""


def any_tiling(draw, workload, tiler):
    """Any strategy that tiles the cluster."""
    counts, left = [0] * len(tiler.sizes), workload.num_devices
    for candidate in draw(st.permutations(range(len(counts)))):
        counts[candidate] = draw(st.integers(0, left // tiler.sizes[candidate]))
        left -= counts[candidate] * tiler.sizes[candidate]
    return tiler.fill(counts)


@given(st.data(), problems(max_steps=4), st.sampled_from(list(Objective)))
@settings(max_examples=examples(60), deadline=None)
def test_estimates_are_near_what_is_planned(data, problem, objective):
    object.__setattr__(problem, "objective", objective)
    workload = workload_of(problem)
    tiler = Tiler(workload, problem.devices_per_node)
    counts = any_tiling(data.draw, workload, tiler)
    estimator = Estimator(workload, objective)
    planned = PlannedSteps(problem, price_steps(problem, problem.samples)).under(
        strategy_of(workload.candidates, counts)
    )
    for step, estimate_s in enumerate(estimator.times_s(np.array([counts]))[0]):
        planned_s = planned.time_s(step) - planned.update_s
        if np.isinf(estimate_s):  # never, or later than estimates go
            assert planned_s * HIGH >= estimator.deadlines_s[-1]
        else:
            assert LOW[objective] <= estimate_s / planned_s <= HIGH


@given(st.data(), problems(max_steps=5))
@settings(max_examples=examples(20), deadline=None)
def test_many_strategies_and_steps_at_once_are_estimated_as_each_alone(data, problem):
    workload = workload_of(problem)
    tiler, estimator = Tiler(workload, problem.devices_per_node), Estimator(workload, problem.objective)
    strategies = np.array([any_tiling(data.draw, workload, tiler) for _ in range(4)])
    together = estimator.times_s(strategies)
    for row, counts in enumerate(strategies):
        for step in range(len(problem.samples)):
            assert estimator.times_s(counts[None], np.array([step]))[0, 0] == together[row, step]


@given(st.data(), problems(max_steps=4))
@settings(max_examples=examples(20), deadline=None)
def test_no_strategy_is_estimated_below_the_floor_of_all(data, problem):
    workload = workload_of(problem)
    tiler, estimator = Tiler(workload, problem.devices_per_node), Estimator(workload, problem.objective)
    counts = any_tiling(data.draw, workload, tiler)
    assert (estimator.times_s(np.array([counts]))[0] >= workload.floors_s() * (1 - 1e-9)).all()


def test_three_long_sequences_on_two_pipelines_take_the_time_of_two():
    cost = SimpleCost(a_s=0.0, b_s=1.0, c_s=0.0)
    workload = workload_of(make_problem(cost, num_devices=2, samples=[[100, 100, 100]], stages=(1,), degrees=(1,)))
    estimate_s = Estimator(workload, Objective.FLOW_SHOP).times_s(counts_of(workload, d1s1=2)[None])[0, 0]
    assert 200 <= estimate_s <= 200 * DEADLINE_RATIO


def test_a_step_with_a_sequence_that_no_pipeline_holds_takes_infinitely_long():
    problem = make_problem(SimpleCost(capacity=60), num_devices=4, samples=[[100, 5], [50, 5]], stages=(1,))
    workload = workload_of(problem)
    estimator = Estimator(workload, problem.objective)
    times_s = estimator.times_s(np.array([counts_of(workload, d1s1=4), counts_of(workload, d2s1=1, d1s1=2)]))
    assert np.isinf(times_s).tolist() == [[True, False], [False, False]]


def test_the_bubble_of_stages_counts():
    cost = SimpleCost(a_s=0.0, b_s=1.0, c_s=0.0, loss=0.0)
    workload = workload_of(make_problem(cost, num_devices=4, samples=[[10] * 40], degrees=(1,)))
    alone, deep = Estimator(workload, Objective.FLOW_SHOP).times_s(
        np.array([counts_of(workload, d1s1=4), counts_of(workload, d1s4=1)])
    )[:, 0]
    assert alone == pytest.approx(100, rel=0.01)
    assert deep == pytest.approx(100 + 3 * 2.5, rel=0.01)
