"""The lower bound never exceeds the true optimum, found by trying every assignment and every packing."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.scheme import dense_scheme
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import find_policy
from lengthwise.plan.solve.makespan import longest_first, makespan_bound
from tests.plan.conftest import SimpleCost


def optimum_s(lengths, num_devices, cost):
    """Seconds of the best plan without padding: all assignments, each with its fewest micro-batches."""
    times = cost.sequence_times_s(np.array(lengths), None)
    best = float("inf")
    for owners in product(range(num_devices), repeat=len(lengths)):
        loads = []
        for device in range(num_devices):
            mine = tuple(i for i, owner in enumerate(owners) if owner == device)
            held = tuple(sorted(lengths[i] for i in mine))
            loads.append(sum(times[i] for i in mine) + cost.c_s * fewest_bins(held, cost.capacity))
        best = min(best, max(loads))
    return best


@cache
def fewest_bins(sizes, capacity):
    if not sizes:
        return 0
    return min(
        max(bins) + 1
        for bins in product(range(len(sizes)), repeat=len(sizes))
        if all(sum(s for s, b in zip(sizes, bins) if b == k) <= capacity for k in range(len(sizes)))
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(30, 60),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_bound_is_below_the_optimum_and_balanced_above_it(lengths, num_devices, capacity, overhead_s):
    cost = SimpleCost(c_s=overhead_s, capacity=capacity)
    planner = Planner(
        policy="balanced", arrange=find_policy("balanced"), cost=cost, scheme=dense_scheme(1),
        num_devices=num_devices, memory_bytes=2**40, max_length=30,
    )  # fmt: skip
    plan = planner(GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=tuple(lengths)))
    best_s = optimum_s(lengths, num_devices, cost) + plan.update_s
    assert plan.lower_bound_s <= best_s * (1 + 1e-12)
    assert plan.time_s >= best_s * (1 - 1e-12)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60), st.integers(1, 12))
def test_schedules_hold_every_job_once_and_are_at_least_the_bound(times, num_machines):
    jobs = longest_first(np.array(times), num_machines)
    assert sorted(job for held in jobs for job in held) == list(range(len(times)))
    makespan = max(sum(times[job] for job in held) for held in jobs)
    assert makespan >= makespan_bound(times, num_machines) * (1 - 1e-12)
    assert makespan <= makespan_bound(times, num_machines) * (4 / 3 + 1e-9)


@pytest.mark.parametrize(
    ("times", "machines", "bound"),
    [([], 3, 0.0), ([5.0], 3, 5.0), ([4, 4, 4, 4], 3, 8.0), ([3, 3, 2, 2, 2], 2, 6.0), ([1] * 7, 3, 3.0)],
)
def test_known_bounds(times, machines, bound):
    assert makespan_bound(times, machines) == pytest.approx(bound)


def test_local_search_repairs_what_longest_first_misses():
    times = np.array([3.0, 3.0, 2.0, 2.0, 2.0])  # LPT gives 7, the optimum is 6
    assert max(times[held].sum() for held in longest_first(times, 2)) == 6.0
