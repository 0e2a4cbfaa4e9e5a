from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.plan.dcp.accumulation import AccumulationRange, accumulate, idle_share, knapsack
from tests.examples import examples

SAME_IDLE = 1e-9
"""Idle shares this close are ties, which the smaller step wins: sums in another order round differently."""

times = st.lists(st.floats(0.5, 8.0), min_size=1, max_size=4)


def by_brute_force(times_s, limits, *, devices=None, sizes=None, max_size=None):
    """Least idle share and the size of the smallest step that reaches it, over all counts."""
    times_s = np.asarray(times_s)
    sizes = np.ones(len(times_s), dtype=int) if sizes is None else np.asarray(sizes)
    top_s = limits.g_max * max(times_s) * (1 + 1e-9)
    most = [limits.g_max if limits.every_group else int(top_s / each) for each in times_s]
    found = []
    for counts in product(*(range(limits.g_min, each + 1) for each in most)):
        counts = np.array(counts)
        if (counts * times_s).max() <= top_s and (max_size is None or counts @ sizes <= max_size):
            found.append((idle_share(times_s, counts, devices=devices), int(counts @ sizes)))
    least = min(idle for idle, _ in found)
    return least, min(size for idle, size in found if idle <= least + SAME_IDLE)


def check(times_s, limits, **options):
    counts = accumulate(times_s, limits, **options)
    idle, size = by_brute_force(times_s, limits, **options)
    sizes = options.get("sizes") or np.ones(len(times_s), dtype=int)
    assert abs(idle_share(times_s, counts, devices=options.get("devices")) - idle) <= SAME_IDLE
    assert int(counts @ sizes) == size
    assert (counts >= limits.g_min).all()


@given(times, st.integers(1, 2), st.integers(0, 2), st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_counts_have_the_least_idle_share_of_all_counts(times_s, g_min, more, every_group):
    times_s = [max(each, max(times_s) / 3) for each in times_s]  # keeps brute force small
    check(times_s, AccumulationRange(g_min=g_min, g_max=g_min + more, every_group=every_group))


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4), st.data())
@settings(max_examples=examples(80), deadline=None)
def test_counts_under_a_cap_have_the_least_idle_share_of_all_counts_under_it(groups, data):
    times_s, devices, sizes = (list(column) for column in zip(*groups))
    times_s = [max(each, max(times_s) / 4) for each in times_s]
    limits = AccumulationRange(g_min=data.draw(st.integers(1, 2)), g_max=3)
    cap = limits.g_min * sum(sizes) + data.draw(st.integers(0, 20))
    check(times_s, limits, devices=devices, sizes=sizes, max_size=cap)


def test_a_large_cap_in_tokens_still_holds():
    generator = np.random.default_rng(0)
    for _ in range(20):
        times_s, sizes = generator.uniform(1, 5, 6), generator.integers(1000, 60_000, 6)
        cap = int(generator.uniform(1.5, 4.0) * sizes.sum())
        counts = accumulate(times_s, AccumulationRange(), sizes=sizes, max_size=cap)
        assert counts.min() >= 1
        assert counts @ sizes <= cap


def test_equal_groups_run_the_fewest_micro_batches():
    assert accumulate([3.0] * 5, AccumulationRange(g_min=2, g_max=9)).tolist() == [2] * 5


def test_multiples_of_one_time_wait_for_nobody():
    counts = accumulate([0.1, 0.3, 0.7], AccumulationRange(g_max=3))
    assert counts.tolist() == [21, 7, 3]
    assert idle_share([0.1, 0.3, 0.7], counts) == pytest.approx(0.0, abs=SAME_IDLE)


def test_more_groups_idle_far_less_than_without_accumulation():
    shares = []
    for seed in range(12):
        times_s = np.exp(np.random.default_rng(seed).uniform(0, np.log(4), 32))
        counts = accumulate(times_s, AccumulationRange(g_max=5))
        shares.append((idle_share(times_s, np.ones(32)), idle_share(times_s, counts)))
    without, with_it = np.mean(shares, axis=0)
    assert without > 0.4
    assert with_it < 0.05


def test_a_cap_below_g_min_is_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"hold 30, over the cap of 29"):
        accumulate([1.0, 2.0], AccumulationRange(g_min=2), sizes=[5, 10], max_size=29)


def test_a_range_upside_down_is_refused():
    with pytest.raises(InputError, match="g_min=3 and g_max=2"):
        AccumulationRange(g_min=3, g_max=2)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=4), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_the_knapsack_holds_the_greatest_value_in_the_least_room(items, data):
    values, sizes, most = (list(column) for column in zip(*items))
    capacity = data.draw(st.integers(0, 60))
    counts = knapsack(values, sizes, most, capacity)
    fitting = [
        (-sum(n * v for n, v in zip(held, values)), sum(n * s for n, s in zip(held, sizes)))
        for held in product(*(range(each + 1) for each in most))
    ]
    best = min(entry for entry in fitting if entry[1] <= capacity)
    assert (-int(counts @ values), int(counts @ sizes)) == best
    assert (counts <= most).all()
