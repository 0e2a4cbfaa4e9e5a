"""Schedules of a handful of jobs beside the best of all schedules: exact to eight jobs, near it at nine."""

import numpy as np
import pytest

from lengthwise.plan.solve.shop import Machines, Objective, SearchEffort, schedule
from lengthwise.plan.solve.shop.exact import exact
from lengthwise.plan.solve.shop.model import make_problem

from .brute import optima, span_of

ROUNDING = 1e-9


def instance(rng, fewest, most):
    """Jobs on up to four machines of up to three types, with a constant per batch, or per job, or none."""
    kinds = int(rng.integers(1, 4))
    counts = rng.multinomial(int(rng.integers(kinds, 5)) - kinds, np.ones(kinds) / kinds) + 1
    per_batch = rng.random() < 0.5
    machines = [
        Machines(
            count=int(count),
            stages=int(rng.choice([1, 1, 2, 4])),
            setup=float(rng.choice([0, 5, 40, 100])) if per_batch else 0.0,
            capacity=int(rng.choice([2000, 4000, 8000, 12000])),
            min_fill=int(rng.choice([1, 200, 500, 1000])),
            takes_larger=bool(rng.random() < 0.2),
        )
        for count in counts
    ]
    num_jobs, largest = int(rng.integers(fewest, most + 1)), max(each.capacity for each in machines)
    short, long = rng.integers(50, 1500, num_jobs), rng.integers(50, largest, num_jobs)
    sizes = np.where(rng.random(num_jobs) < 0.5, short, long)
    if rng.random() < 0.2:
        sizes = rng.choice(rng.integers(50, largest, 2), num_jobs)
    slope, bend = rng.uniform(0.02, 0.2, kinds), rng.uniform(0, 2e-5, kinds)
    per_job = np.zeros(kinds) if per_batch else rng.choice([0, 5, 40, 100], kinds)
    return slope[:, None] * sizes + bend[:, None] * sizes.astype(float) ** 2 + per_job[:, None], sizes, machines


def best_makespan(work, sizes, machines, objective):
    """From the search of all schedules that is itself compared with its definition below."""
    problem = make_problem(work, sizes, machines, objective=objective)
    _, jobs, packed = exact(problem)
    ends = []
    for kind, mine, batches in zip(problem.kinds, jobs, packed):
        times = [sum(problem.work[kind][mine[index]] for index in batch) + machines[kind].setup for batch in batches]
        ends.append(span_of(times, machines[kind].stages, objective))
    return max(ends)


def ratios(rng, number, fewest, most, **options):
    """Makespans over the least ones, of both objectives."""
    over = {objective: [] for objective in Objective}
    for _ in range(number):
        work, sizes, machines = instance(rng, fewest, most)
        for objective in Objective:
            planned = schedule(work, sizes, machines, objective=objective, **options)
            over[objective].append(planned.makespan / best_makespan(work, sizes, machines, objective))
    return over


def test_all_schedules_of_seven_jobs_are_searched_as_the_definition_says():
    rng = np.random.default_rng(3)
    for _ in range(4):
        work, sizes, machines = instance(rng, 7, 7)
        for objective in Objective:
            _, kept = optima(work.tolist(), sizes.tolist(), machines, objective)
            assert best_makespan(work, sizes, machines, objective) == pytest.approx(kept, rel=ROUNDING)


@pytest.mark.deep
def test_schedules_of_seven_and_eight_jobs_are_the_best():
    over = ratios(np.random.default_rng(24), 40, 7, 8)
    assert max(map(max, over.values())) <= 1 + SearchEffort().tolerance


@pytest.mark.deep
def test_of_nine_jobs_what_single_exchanges_leave_is_found_by_settling_pairs():
    over = ratios(np.random.default_rng(24), 8, 9, 9)[Objective.FLOW_SHOP]
    without = ratios(np.random.default_rng(24), 8, 9, 9, effort=SearchEffort(exact_pairs=0))[Objective.FLOW_SHOP]
    assert max(over) <= 1.03
    assert np.mean(over) < np.mean(without)


@pytest.mark.deep
def test_no_schedule_of_ten_thousand_small_instances_is_three_percent_above_the_best():
    over = ratios(np.random.default_rng(25), 5000, 2, 8)
    assert max(map(max, over.values())) <= 1.03
