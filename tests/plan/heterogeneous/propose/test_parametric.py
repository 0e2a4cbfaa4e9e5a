from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings

from lengthwise.plan.heterogeneous.propose.closed_form import relax
from lengthwise.plan.heterogeneous.propose.parametric import integer_strategies
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem
from tests.plan.propose.workloads import counts_of, problems, workload_of

EXACT = 1e-10
"""Width at which the search ends, where its time is compared."""


def exhaustive(workload, *, end, bubble):
    """The least time for the ``end`` shortest classes over every cut into intervals, candidate and pipeline count."""
    work_s = (workload.charged_s * workload.mean)[:, ::-1]
    single_s = (workload.work_s + workload.setup_s[:, None])[:, ::-1]
    options = {}
    for stop in range(1, end + 1):
        for start in range(stop):
            options[start, stop] = held = []
            for candidate, size in enumerate(workload.devices.tolist()):
                if workload.limits[candidate] < workload.longest[::-1][stop - 1]:
                    continue
                for count in range(1, workload.num_devices // size + 1):
                    time_s = work_s[candidate, start:stop].sum() / count
                    if bubble:
                        stages = int(workload.stages[candidate])
                        time_s += (stages - 1) * single_s[candidate, stop - 1]
                        time_s = max(time_s, stages * single_s[candidate, stop - 1])
                    held.append((time_s, size * count))
    best = np.inf
    for cuts in product((False, True), repeat=end - 1):
        ends = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), end]
        for chosen in product(*(options[pair] for pair in pairwise(ends))):
            if sum(devices for _, devices in chosen) <= workload.num_devices:
                best = min(best, max(time_s for time_s, _ in chosen))
    return best


@pytest.mark.parametrize("bubble", [False, True])
@given(problem=problems(max_devices=3, max_steps=2, max_sequences=2))
@settings(max_examples=examples(40), deadline=None)
def test_equals_exhaustive_search_for_every_length_limit(bubble, problem):
    workload = workload_of(problem)
    found = integer_strategies(workload, bubble=bubble, tolerance=EXACT)
    for number, strategy in enumerate(found):
        end = len(found) - number
        assert strategy.max_length == workload.longest[::-1][end - 1]
        assert strategy.time_s == pytest.approx(exhaustive(workload, end=end, bubble=bubble), rel=1e-8)


@given(problems(max_steps=2, max_sequences=5))
@settings(max_examples=examples(20), deadline=None)
def test_strategies_fit_the_cluster_and_take_at_least_the_fractional_time(problem):
    workload = workload_of(problem)
    for bubble in (False, True):
        found = integer_strategies(workload, bubble=bubble)
        assert found[0].time_s >= relax(workload).time_s * (1 - 1e-6)
        for strategy in found:
            assert 0 < strategy.counts @ workload.devices <= problem.num_devices
            assert (workload.limits * (strategy.counts > 0)).max() >= strategy.max_length


@given(problems(max_steps=2, max_sequences=5))
@settings(max_examples=examples(20), deadline=None)
def test_the_bubble_never_makes_it_faster(problem):
    workload = workload_of(problem)
    printed, real = (integer_strategies(workload, bubble=bubble, tolerance=EXACT) for bubble in (False, True))
    assert all(a.time_s <= b.time_s * (1 + 1e-6) for a, b in zip(printed, real))


def test_as_printed_one_long_sequence_is_split_over_pipelines_that_cannot_share_it():
    cost = SimpleCost(a_s=0.1, b_s=0.0, c_s=0.0, loss=0.2)
    workload = workload_of(make_problem(cost, num_devices=4, samples=[[100]], stages=(1,)))
    printed, real = (integer_strategies(workload, bubble=bubble)[0].counts for bubble in (False, True))
    assert printed.tolist() == counts_of(workload, d1s1=4).tolist()
    assert real.tolist() == counts_of(workload, d4s1=1).tolist()


def test_only_the_lengths_asked_for_are_solved():
    workload = workload_of(make_problem(samples=[[10, 20, 30, 40]]))
    every = {each.max_length: each for each in integer_strategies(workload)}
    some = integer_strategies(workload, longest=np.array([20, 40]))
    assert [each.max_length for each in some] == [40, 20]
    assert all(each.time_s == pytest.approx(every[each.max_length].time_s, rel=2e-3) for each in some)
