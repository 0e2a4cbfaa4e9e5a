from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lengthwise.core.pipeline_config import Method
from lengthwise.plan.heterogeneous.propose.tiling import Tiler, fillable, strategy_of
from lengthwise.plan.space.placement import placeable
from tests.examples import examples
from tests.plan.costs import make_problem
from tests.plan.propose.workloads import counts_of, problems, workload_of


def tiler_of(problem):
    return Tiler(workload_of(problem), problem.devices_per_node)


@given(st.data(), problems(max_devices=12, max_steps=1))
@settings(max_examples=examples(40), deadline=None)
def test_filled_strategies_tile_the_cluster_and_keep_what_fitted(data, problem):
    tiler = tiler_of(problem)
    candidate = data.draw(st.integers(0, len(tiler.sizes) - 1))
    count = data.draw(st.integers(0, problem.num_devices // tiler.sizes[candidate]))
    filled = tiler.fill([count * (at == candidate) for at in range(len(tiler.sizes))])
    assert sum(size * number for size, number in zip(tiler.sizes, filled)) == problem.num_devices
    assert filled[candidate] >= count  # single devices fill any rest


@given(st.data(), problems(max_devices=12, max_steps=1))
@settings(max_examples=examples(40), deadline=None)
def test_fractions_are_rounded_to_neighbours_that_tile_the_cluster(data, problem):
    tiler = tiler_of(problem)
    weights = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(tiler.sizes), max_size=len(tiler.sizes))))
    weights[0] += 0.1
    counts = weights * problem.num_devices / (weights @ tiler.workload.devices)
    for rounded in tiler.round(counts):
        assert sum(size * number for size, number in zip(tiler.sizes, rounded)) == problem.num_devices
        assert (np.array(rounded) >= np.floor(counts)).all()


def test_whole_counts_are_their_own_rounding():
    tiler = tiler_of(make_problem(num_devices=8, samples=[[10]]))
    counts = counts_of(tiler.workload, d4s1=1, d2s1=1, d1s1=2)
    assert tiler.round(counts.astype(float)) == [tuple(counts.tolist())]


def test_a_candidate_that_must_be_there_is_there():
    tiler = tiler_of(make_problem(num_devices=8, samples=[[10]]))
    only = counts_of(tiler.workload, d1s1=8).astype(float)
    wanted = int(np.flatnonzero(counts_of(tiler.workload, d4s1=1))[0])
    assert all(rounded[wanted] == 1 for rounded in tiler.round(only, least=wanted))


def test_pipelines_are_given_up_where_the_rest_cannot_be_filled():
    tiler = tiler_of(make_problem(num_devices=12, samples=[[10]], degrees=(4, 6), stages=(1,)))
    assert tiler.fill([1, 1]) in [(3, 0), (0, 2)]


def test_nothing_fills_what_cannot_be_tiled():
    tiler = tiler_of(make_problem(num_devices=10, samples=[[10]], degrees=(4,), stages=(1,)))
    assert tiler.fill([1]) is None


@pytest.mark.parametrize("devices_per_node", [1, 4, 6, 8])
def test_placeable_as_the_placement_says(devices_per_node):
    problem = make_problem(
        num_devices=12, devices_per_node=devices_per_node, samples=[[10]], degrees=(1, 3, 4, 8), stages=(1, 2)
    )
    tiler = tiler_of(problem)
    for counts in tiler.round(np.full(len(tiler.sizes), 12 / sum(tiler.sizes))):
        strategy = strategy_of(tiler.workload.candidates, counts)
        assert tiler.is_placeable(counts) == placeable(strategy, 12, devices_per_node)


def test_candidates_that_hold_the_longest_sequences_come_first():
    problem = make_problem(num_devices=8, samples=[[10]], methods=(Method.ULYSSES,))
    strategy = strategy_of(problem.candidates, [1] * len(problem.candidates))
    limits = [candidate.max_tokens for candidate, _ in strategy]
    assert limits == sorted(limits, reverse=True)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 30))
def test_as_many_devices_are_used_as_some_mix_fills(kinds, num_devices):
    kinds = [(size, limit) for size, limit in kinds if size <= num_devices]
    assume(any(limit >= 5 for _, limit in kinds))
    candidates = [SimpleNamespace(num_devices=size, max_tokens=limit) for size, limit in kinds]
    filled = {0}
    for number in range(1, num_devices + 1):
        filled |= {number} if any(number - size in filled for size, _ in kinds) else set()
    mixed = max(size + rest for size, limit in kinds if limit >= 5 for rest in filled if size + rest <= num_devices)
    equal = max(num_devices // size * size for size, limit in kinds if limit >= 5)
    assert fillable(candidates, num_devices, holding=5) == sorted({num_devices, mixed, equal}, reverse=True)
