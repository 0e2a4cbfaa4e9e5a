from itertools import pairwise

import numpy as np
import pytest

from lengthwise.plan.solve.shop import Machines, Objective, SearchEffort, certify, schedule

from .brute import largest_job, optima, random_instance

SUM_ROUNDING = 1e-9
"""Different orders of adding a handful of floats."""
CLASS_LOSS = 2e-3
"""Grouping equal jobs changes the classes on which prices are searched, not what they can prove."""


def check(rng, efforts):
    """Per effort: 1 if the schedule is optimal. Asserts that no bound exceeds and no schedule undercuts the optimum."""
    work, sizes, machines = random_instance(rng)
    optimal = []
    for objective in Objective:
        if sizes.max() > largest_job(machines):
            with pytest.raises(ValueError, match="can run on no machine"):
                schedule(work, sizes, machines, objective=objective)
            continue
        free, kept = optima(work.tolist(), sizes.tolist(), machines, objective)
        for effort in efforts:
            found = schedule(work, sizes, machines, objective=objective, effort=effort)
            assert 0 < found.lower_bound <= free * (1 + SUM_ROUNDING), (work, sizes, machines, objective)
            assert kept * (1 - SUM_ROUNDING) <= found.makespan, (work, sizes, machines, objective)
            optimal.append(found.makespan <= kept * (1 + SUM_ROUNDING))
    return optimal


def test_no_schedule_ends_before_the_bound_and_none_of_few_jobs_ends_later_than_the_best():
    rng = np.random.default_rng(1)
    optimal = [each for step in range(150) for each in check(rng, [SearchEffort(exact_jobs=0 if step % 2 else 6)])]
    assert np.mean(optimal) >= 0.99


@pytest.mark.deep
def test_five_thousand_optima_are_never_below_the_bound():
    rng = np.random.default_rng(2)
    efforts = SearchEffort(), SearchEffort(exact_jobs=0)
    optimal = np.array([each for _ in range(2700) for each in zip(*[iter(check(rng, efforts))] * 2)])
    assert len(optimal) >= 5000
    assert optimal[:, 0].mean() >= 0.995
    assert optimal[:, 1].mean() >= 0.99  # without trying out all schedules


def lengths(rng, count):
    sizes = np.exp(rng.normal(6, 1.2, count)).astype(np.int64) + 16
    return np.minimum(sizes, 7000)


MIXED = [
    Machines(count=2, capacity=8000, setup=3.0),
    Machines(count=4, stages=2, capacity=4000, setup=1.0, min_fill=300),
    Machines(count=3, stages=4, capacity=2000, min_fill=300),
]


def times(sizes, slopes=(0.03, 0.04, 0.02)):
    return np.outer(slopes, sizes) + np.outer(np.array(slopes) * 1e-4, sizes.astype(float) ** 2)


@pytest.mark.parametrize("objective", Objective)
def test_more_machines_never_raise_the_bound(objective):
    sizes = lengths(np.random.default_rng(5), 200)
    bounds = [
        certify(
            times(sizes), sizes, [*MIXED[:2], Machines(count=count, stages=4, capacity=2000)], objective=objective
        ).bound
        for count in (1, 2, 4, 8)
    ]
    assert all(later <= earlier * (1 + CLASS_LOSS) for earlier, later in pairwise(bounds))


def test_one_long_job_takes_all_its_stages():
    machines = [Machines(count=3, stages=4, setup=2.0, capacity=100)]
    assert certify(np.array([[10.0]]), np.array([50]), machines).bound == pytest.approx(4 * 12.0)


def test_the_bound_of_equal_machines_is_the_mean_work_if_jobs_are_small():
    sizes = np.full(1000, 10)
    bound = certify(np.full((1, 1000), 2.0), sizes, [Machines(count=10, capacity=10_000)]).bound
    assert bound == pytest.approx(200.0, rel=1e-4)


def test_long_jobs_are_counted_one_by_one():
    """Five jobs of 10 on two machines take three turns, not two and a half."""
    bound = certify(np.full((1, 5), 10.0), np.full(5, 60), [Machines(count=2, capacity=100)]).bound
    assert bound == pytest.approx(30.0, rel=1e-4)
