from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from lengthwise.plan.heterogeneous.propose.estimate import Estimator
from lengthwise.plan.heterogeneous.propose.moves import exchanges, merges, refills, splits
from lengthwise.plan.heterogeneous.propose.search import Search
from lengthwise.plan.heterogeneous.propose.starts import make_starts
from lengthwise.plan.heterogeneous.propose.tiling import Tiler
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem
from tests.plan.propose.workloads import problems, workload_of


def search_of(problem):
    """A search on all samples, with its starts estimated."""
    workload = workload_of(problem)
    tiler = Tiler(workload, problem.devices_per_node)
    search = Search(Estimator(workload, problem.objective), tiler, range(len(problem.samples)))
    starts = make_starts(workload, tiler, holding=problem.max_length)
    search.estimate((*starts.homogeneous, *starts.published, *starts.others))
    return search


def every_tiling(tiler):
    """All strategies of a small cluster."""
    ranges = [range(tiler.workload.num_devices // size + 1) for size in tiler.sizes]
    return [counts for counts in product(*ranges) if np.dot(counts, tiler.sizes) == tiler.workload.num_devices]


@given(problems(max_steps=4))
@settings(max_examples=examples(20), deadline=None)
def test_moves_lead_to_other_strategies_that_tile_the_cluster(problem):
    tiler = search_of(problem).tiler
    present = tiler.fill([0] * len(tiler.sizes))
    for move in (exchanges, refills, splits, merges):
        for unit in (1, problem.num_devices):
            for counts in move(tiler, present, unit):
                assert np.dot(counts, tiler.sizes) == problem.num_devices
                assert min(counts) >= 0


@given(problems(max_steps=4))
@settings(max_examples=examples(20), deadline=None)
def test_climbing_never_gets_slower_and_keeps_what_must_be_held(problem):
    search = search_of(problem)
    start = search.ranked(holding=problem.max_length)[0]
    reached = search.climb(start, holding=problem.max_length)
    assert search.mean_s(reached) <= search.mean_s(start)
    assert search.tiler.max_length(reached) >= problem.max_length


@pytest.mark.parametrize("loss, c_s", [(0.1, 0.0), (0.3, 0.5), (-0.02, 0.2)])
def test_climbing_reaches_the_best_of_all_strategies_on_eight_devices(loss, c_s):
    random = np.random.default_rng(0)
    samples = [np.clip(random.lognormal(3, 1, size=60), 1, 300).astype(int) for _ in range(6)]
    cost = SimpleCost(a_s=1e-3, c_s=c_s, loss=loss, capacity=150)
    search = search_of(make_problem(cost, num_devices=8, max_length=300, samples=samples, stages=(1, 2)))
    reached = search.climb(search.ranked(holding=300)[0], holding=300)
    search.estimate(every_tiling(search.tiler))
    assert search.mean_s(reached) <= search.mean_s(search.ranked(holding=300)[0]) * 1.005


def test_a_second_search_looks_for_what_the_first_strategy_is_slow_at():
    cost = SimpleCost(a_s=1e-4, b_s=5e-2, c_s=0.0, loss=0.3, capacity=1000)
    long, short = [1000], [10] * 400
    search = search_of(make_problem(cost, num_devices=4, max_length=1000, samples=[long, short] * 2, stages=(1,)))
    first = search.climb(search.ranked(holding=1000)[0], holding=1000)
    limits_s = search.times_s[first]
    second = search.climb(search.ranked(limits_s)[0], limits_s)
    together_s = np.minimum(limits_s, search.times_s[second])
    assert together_s.mean() < 0.95 * min(times_s.mean() for times_s in search.times_s.values())
