import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.plan.solve.shop.exchange_moves import packing
from lengthwise.plan.solve.shop.model import Machines, Objective, estimator, make_problem
from lengthwise.plan.solve.shop.pack import fewest_conceivable, improve, pack, spread

from .brute import best_packings, span_of

machine_types = st.builds(
    Machines,
    count=st.just(1),
    stages=st.sampled_from([1, 2, 4]),
    setup=st.sampled_from([0.0, 3.0, 50.0]),
    capacity=st.integers(100, 400),
    min_fill=st.sampled_from([1, 40, 100]),
)
job_sizes = st.lists(st.integers(1, 100), min_size=1, max_size=40).map(lambda sizes: sorted(sizes, reverse=True))


def work_of(sizes):
    return [size + 0.01 * size * size for size in sizes]


@settings(deadline=None)
@given(job_sizes, machine_types, st.sampled_from(Objective))
def test_every_job_is_in_one_batch_within_the_capacity_and_the_span_is_that_of_the_formula(sizes, machines, objective):
    work = work_of(sizes)
    span, batches = pack(work, sizes, machines, objective=objective)
    assert sorted(job for batch in batches for job in batch) == list(range(len(sizes)))
    assert all(0 < sum(sizes[job] for job in batch) <= machines.capacity for batch in batches)
    times = [sum(work[job] for job in batch) + machines.setup for batch in batches]
    assert span == pytest.approx(span_of(times, machines.stages, objective))


@settings(deadline=None)
@given(job_sizes, machine_types, st.sampled_from(Objective))
def test_balance_is_estimated_to_be_at_least_as_good_as_what_is_packed(sizes, machines, objective):
    work = work_of(sizes)
    span, batches = pack(work, sizes, machines, objective=objective)
    most = max(-(-sum(sizes) // machines.capacity), sum(sizes) // machines.min_fill)
    if len(batches) <= most:  # else the capacity forced more
        assert estimator(machines, objective)(sum(work), work[0], sum(sizes)) <= span * (1 + 1e-9)


def test_few_jobs_are_packed_within_a_few_percent_of_the_best():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        sizes = sorted(rng.integers(5, 100, int(rng.integers(2, 7))).tolist(), reverse=True)
        stages, setup = int(rng.choice([2, 4])), float(rng.choice([0, 20]))
        machines = Machines(count=1, stages=stages, setup=setup, capacity=150)
        for objective in Objective:
            work = work_of(sizes)
            _, kept = best_packings(work, sizes, machines, objective)
            ratios.append(pack(work, sizes, machines, objective=objective)[0] / kept[-1])
    assert np.mean(ratios) < 1.005
    assert max(ratios) < 1.1


def test_packing_stops_at_a_span_that_is_enough():
    rng = np.random.default_rng(1)
    sizes = np.sort(rng.integers(5, 100, 30))[::-1].tolist()
    machines = Machines(count=1, stages=4, capacity=200)
    best, _ = pack(work_of(sizes), sizes, machines, objective=Objective.MAX_TIMES_COUNT)
    quick, _ = pack(work_of(sizes), sizes, machines, objective=Objective.MAX_TIMES_COUNT, enough=best * 2)
    assert best <= quick <= best * 2


def test_one_stage_needs_no_more_batches_than_the_capacity_forces():
    machines = Machines(count=1, setup=10.0, capacity=100)
    span, batches = pack([5.0, 4.0, 3.0], [50, 40, 30], machines, objective=Objective.FLOW_SHOP)
    assert len(batches) == 2
    assert span == 32.0


def test_moves_and_swaps_shorten_the_longest_batch():
    work, sizes = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [9, 8, 7, 6, 5, 4]
    batches = [[0, 1, 2], [3, 4, 5]]
    improve(work, sizes, batches, capacity=30, swaps=10)
    assert max(sum(work[job] for job in batch) for batch in batches) == 20.0


def test_jobs_without_room_are_reported_as_no_batches():
    assert spread([3.0, 3.0, 3.0], [60, 60, 60], 2, 100) == []


def test_an_idle_machine_ends_at_once():
    problem = make_problem(
        np.array([[1.0]]), np.array([1]), [Machines(count=1, capacity=1)], objective=Objective.FLOW_SHOP
    )
    assert packing(problem, swaps=1)(0, [], 0.0) == (0.0, [])


def test_large_jobs_leave_no_room_for_others():
    assert fewest_conceivable([9, 9, 9, 4, 4, 4], 10) == 5
    assert fewest_conceivable([9, 9, 6, 4, 4], 10) == 4, "a job of 4 fits beside that of 6"
    assert fewest_conceivable([4, 4, 4], 10) == 2


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(100, 200))
def test_no_packing_has_fewer_batches_than_conceivable(sizes, capacity):
    fewest = [len(sizes)]

    def place(number, room):
        """Job by job into each batch with room, or into a new one."""
        if len(room) >= fewest[0]:
            return
        if number == len(sizes):
            fewest[0] = len(room)
            return
        for batch, left in enumerate([*room, capacity]):
            if left >= sizes[number]:
                place(number + 1, [*room[:batch], left - sizes[number], *room[batch + 1 :]])

    place(0, [])
    assert fewest_conceivable(sizes, capacity) <= fewest[0]
