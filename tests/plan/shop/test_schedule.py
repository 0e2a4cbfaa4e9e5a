from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.plan.solve.shop import Machines, Objective, SearchEffort, certify, schedule
from tests.examples import examples

from .brute import span_of
from .one_f_one_b import one_f_one_b

SUM_ROUNDING = 1e-9
CONTENT = 1e-3
"""Gap to the bound for which many small jobs leave no excuse."""

machine_types = st.builds(
    Machines,
    count=st.integers(1, 5),
    stages=st.sampled_from([1, 1, 2, 4]),
    setup=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    capacity=st.integers(500, 4000),
    min_fill=st.sampled_from([1, 100, 400]),
)
problems = st.tuples(
    st.lists(machine_types, min_size=1, max_size=3),
    st.lists(st.integers(1, 500), min_size=1, max_size=80),
    st.sampled_from(Objective),
)


def work_of(sizes, machines):
    slopes = [1.0 + 0.3 * kind for kind in range(len(machines))]
    return np.array([[slope * size + 1e-3 * size * size for size in sizes] for slope in slopes])


def check(found, work, sizes, machines, objective):
    """All that a schedule promises, from its batches alone."""
    kinds = [kind for kind, each in enumerate(machines) for _ in range(each.count)]
    assert len(found.batches) == len(found.spans) == len(kinds)
    jobs = [job for batches in found.batches for batch in batches for job in batch]
    assert sorted(jobs) == list(range(len(sizes)))
    for kind, batches, span in zip(kinds, found.batches, found.spans):
        times = [sum(work[kind][job] for job in batch) + machines[kind].setup for batch in batches]
        assert all(sum(sizes[job] for job in batch) <= machines[kind].capacity for batch in batches)
        assert all(later <= earlier * (1 + SUM_ROUNDING) for earlier, later in pairwise(times))
        assert span == pytest.approx(span_of(times, machines[kind].stages, objective), rel=SUM_ROUNDING)
    assert found.makespan == max(found.spans)
    assert 0 < found.lower_bound <= found.makespan


@settings(deadline=None, max_examples=examples(60))
@given(problems)
def test_a_schedule_runs_every_job_once_within_capacity_and_its_numbers_follow_from_its_batches(problem):
    machines, sizes, objective = problem
    sizes = np.array(sizes)
    work = work_of(sizes, machines)
    check(schedule(work, sizes, machines, objective=objective), work, sizes, machines, objective)


@settings(deadline=None, max_examples=examples(20))
@given(problems)
def test_equal_inputs_give_equal_schedules(problem):
    machines, sizes, objective = problem
    sizes = np.array(sizes)
    work = work_of(sizes, machines)
    first = schedule(work, sizes, machines, objective=objective)
    assert schedule(work.copy(), sizes.copy(), list(machines), objective=objective) == first


@settings(deadline=None, max_examples=examples(20))
@given(problems)
def test_more_effort_never_loosens_the_bound(problem):
    machines, sizes, objective = problem
    sizes = np.array(sizes)
    work = work_of(sizes, machines)
    certificate = certify(work, sizes, machines, objective=objective)
    effort = SearchEffort(packed_jobs=2000)
    found = schedule(work, sizes, machines, objective=objective, certificate=certificate, effort=effort)
    assert found.lower_bound >= certificate.bound * (1 - SUM_ROUNDING)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=16), st.sampled_from([1, 2, 4, 8]))
def test_batches_in_order_of_their_time_never_take_1f1b_longer_than_the_flow_shop(times, stages):
    times = sorted(times, reverse=True)
    assert one_f_one_b(times, stages) <= span_of(times, stages, Objective.FLOW_SHOP) * (1 + SUM_ROUNDING)


def test_a_job_too_large_for_every_batch_is_named():
    machines = [Machines(count=1, capacity=80), Machines(count=1, capacity=100)]
    with pytest.raises(ValueError, match=r"job 1 \(size 101\) can run on no machine; the largest capacity .* is 100"):
        schedule(np.ones((2, 3)), np.array([5, 101, 7]), machines)


def test_a_job_of_infinite_work_runs_elsewhere():
    sizes = np.array([10, 20, 30])
    work = np.array([[1.0, np.inf, np.inf], [5.0, 6.0, 7.0]])
    found = schedule(work, sizes, [Machines(count=1, capacity=100), Machines(count=1, capacity=100)])
    assert found.batches == (((0,),), ((2, 1),))


def test_fewer_jobs_than_machines_leave_machines_idle():
    found = schedule(np.array([[4.0, 2.0]]), np.array([40, 20]), [Machines(count=5, stages=2, capacity=50)])
    assert sorted(found.spans) == [0, 0, 0, 4, 8]
    assert found.makespan == pytest.approx(found.lower_bound)


def test_work_that_falls_with_size_is_refused():
    with pytest.raises(ValueError, match="must not decrease with size"):
        schedule(np.array([[2.0, 1.0]]), np.array([1, 2]), [Machines(count=1, capacity=9)])


def test_ties_keep_the_order_of_the_input():
    found = schedule(np.full((1, 4), 3.0), np.full(4, 5), [Machines(count=2, capacity=100)])
    assert found.batches == (((0, 2),), ((1, 3),))


def lengths(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = np.exp(np.where(rng.random(count) < 0.05, rng.normal(7.3, 1.25, count), rng.normal(6, 1, count)))
    return np.clip(sizes, 16, 32_768).astype(np.int64)


def polynomial(sizes, *coefficients):
    """Work a l^2 + b l + c per type."""
    return np.array([[a * size * size + b * size + c for size in sizes.astype(float)] for a, b, c in coefficients])


def test_many_jobs_on_equal_machines_reach_the_bound():
    sizes = lengths(1000)
    found = schedule(polynomial(sizes, (1e-6, 0.1, 0.0)), sizes, [Machines(count=16, capacity=100_000)])
    assert found.makespan <= found.lower_bound * (1 + CONTENT)


def test_types_share_long_and_short_jobs_as_their_prices_say():
    """The large machine takes the long jobs, and none of three types is left idle."""
    sizes = lengths(600)
    machines = [
        Machines(count=1, setup=20.0, capacity=40_000),
        Machines(count=3, setup=10.0, capacity=20_000),
        Machines(count=8, setup=5.0, capacity=8_000),
    ]
    work = polynomial(sizes, (1.4e-6, 0.1, 0.0), (2.1e-6, 0.14, 0.0), (3.8e-6, 0.24, 0.0))
    found = schedule(work, sizes, machines)
    assert found.makespan <= found.lower_bound * 1.02
    assert min(found.spans) > 0.9 * found.makespan


def test_grouping_long_jobs_beats_mixing_them_where_stages_wait_for_the_longest():
    """Most machines have four stages, each of which waits for the longest batch; longest-first is blind to that."""
    sizes = lengths(250)
    machines = [
        Machines(count=1, capacity=43_000),
        Machines(count=2, stages=4, capacity=6_000, min_fill=512),
        Machines(count=8, stages=4, capacity=1_900, min_fill=384),
    ]
    work = polynomial(sizes, (1.4e-6, 0.1, 145.0), (1.9e-6, 0.11, 43.0), (0.9e-6, 0.21, 36.0))
    mixed = schedule(work, sizes, machines, effort=SearchEffort(fills=0, exchanged_jobs=0, packed_jobs=0))
    found = schedule(work, sizes, machines)
    assert found.makespan < 0.95 * mixed.makespan
    assert found.makespan <= found.lower_bound * (1 + CONTENT)
    check(found, work, sizes, machines, Objective.FLOW_SHOP)
