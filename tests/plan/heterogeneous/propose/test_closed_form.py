from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from lengthwise.plan.heterogeneous.propose.closed_form import relax
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem
from tests.plan.propose.workloads import problems, workload_of


def literal_eq_4(workload, *, parts):
    """Hydraulis' dynamic programme over n and d in steps of 1 / parts."""
    lengths = workload.lengths[::-1]
    sums_s = np.concatenate(
        [[[0.0]] * len(workload.candidates), np.cumsum((workload.charged_s * workload.mean)[:, ::-1], axis=1)], axis=1
    )

    @cache
    def fastest(devices, end):
        if end == 0:
            return 0.0
        best = np.inf
        for candidate, size in enumerate(workload.devices.tolist()):
            if workload.limits[candidate] < lengths[end - 1]:
                continue
            for share in range(1, devices // size + 1):
                for start in range(end):
                    own_s = (sums_s[candidate, end] - sums_s[candidate, start]) / (share / parts)
                    best = min(best, max(fastest(devices - share * size, start), own_s))
        return best

    return fastest(workload.num_devices * parts, len(lengths))


@pytest.mark.parametrize("capacity, loss", [(1000, 0.2), (60, 0.1), (60, -0.1), (100, 0.5)])
def test_equals_a_fine_dynamic_programme(capacity, loss):
    cost = SimpleCost(capacity=capacity, loss=loss)
    problem = make_problem(cost, num_devices=4, max_length=100, samples=[[5, 40, 90, 100], [5, 5, 40, 100]])
    workload = workload_of(problem)
    exact_s, coarse_s, fine_s = (
        relax(workload).time_s,
        literal_eq_4(workload, parts=4),
        literal_eq_4(workload, parts=24),
    )
    assert exact_s <= fine_s * (1 + 1e-9) <= coarse_s * (1 + 2e-9)
    assert fine_s == pytest.approx(exact_s, rel=0.04)


@given(problems(max_steps=2))
@settings(max_examples=examples(40), deadline=None)
def test_pipelines_occupy_all_devices_for_all_of_the_time(problem):
    workload = workload_of(problem)
    found = relax(workload)
    assert found.counts @ workload.devices == pytest.approx(problem.num_devices)
    spent_s = np.zeros(len(workload.candidates))
    np.add.at(spent_s, found.chosen, workload.mean * workload.charged_s[found.chosen, np.arange(len(found.chosen))])
    assert spent_s == pytest.approx(found.counts * found.time_s)


@given(problems(max_steps=2))
@settings(max_examples=examples(40), deadline=None)
def test_no_length_could_take_a_candidate_with_fewer_device_seconds(problem):
    workload = workload_of(problem)
    found = relax(workload)
    device_s = workload.devices[:, None] * workload.charged_s
    assert (device_s[found.chosen, np.arange(len(found.chosen))] == device_s.min(axis=0)).all()
