from collections import Counter
from functools import cache
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, Strategy, uniform_scheme
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.placement import place, placeable
from tests.examples import examples
from tests.plan.costs import SimpleCost


@cache
def candidate(degree, stages=1):
    method = Method.DENSE if degree == 1 else Method.ULYSSES
    scheme = uniform_scheme(32, degree=degree, stages=stages, method=method)
    return Candidate(scheme=scheme, cost=SimpleCost(), num_cluster_devices=64)


def counts_of(shapes):
    return [(candidate(*shape), count) for shape, count in Counter(shapes).items()]


def stages_of(placed):
    """Ranks of every stage of every pipeline."""
    for each, ranks in placed:
        degree = each.scheme.degree
        for start in range(0, each.num_devices, degree):
            yield ranks[start : start + degree]


def num_nodes(ranks, per_node):
    return len({rank // per_node for rank in ranks})


def num_crossing(placed, per_node):
    """Stages on more nodes than their size makes them."""
    return sum(num_nodes(stage, per_node) > -(-len(stage) // per_node) for stage in stages_of(placed))


def fewest_crossing(sizes, nodes):
    """Brute force: groups that cannot be put whole into the nodes, at least."""

    @cache
    def most_whole(at, free):
        if at == len(sizes):
            return 0
        best = most_whole(at + 1, free)
        for node, room in enumerate(free):
            if room >= sizes[at] and (node == 0 or free[node - 1] != room):
                left = tuple(sorted((*free[:node], room - sizes[at], *free[node + 1 :])))
                best = max(best, 1 + most_whole(at + 1, left))
        return best

    return len(sizes) - most_whole(0, tuple(sorted(nodes)))


def nodes_of(num_devices, per_node):
    return [min(per_node, num_devices - start) for start in range(0, num_devices, per_node)]


@st.composite
def tilings(draw, *, max_degree=20, max_stages=4, max_pipelines=8):
    """Pipelines of any shape, and a cluster that they tile in nodes of any size."""
    shape = st.tuples(st.integers(1, max_degree), st.integers(1, max_stages))
    shapes = draw(st.lists(shape, min_size=1, max_size=max_pipelines))
    return shapes, sum(degree * stages for degree, stages in shapes), draw(st.integers(1, 12))


@given(tilings())
def test_ranks_tile_the_cluster_in_the_order_asked_for(tiling):
    shapes, num_devices, per_node = tiling
    counts = counts_of(shapes)
    placed = place(counts, num_devices, per_node)
    assert [each for each, _ in placed] == [each for each, count in counts for _ in range(count)]
    strategy = Strategy(schemes=tuple(each.scheme for each, _ in placed), ranks=tuple(ranks for _, ranks in placed))
    assert strategy.num_devices == num_devices
    assert placed == place(counts, num_devices, per_node)


@given(tilings(max_degree=7, max_stages=2, max_pipelines=5))
@settings(max_examples=examples(200), deadline=None)
def test_as_few_stages_cross_nodes_as_any_placement_needs(tiling):
    shapes, num_devices, per_node = tiling
    per_node = max(per_node, *(degree for degree, _ in shapes))
    counts = counts_of(shapes)
    sizes = sorted((degree for degree, stages in shapes for _ in range(stages)), reverse=True)
    fewest = fewest_crossing(tuple(sizes), tuple(nodes_of(num_devices, per_node)))
    assert num_crossing(place(counts, num_devices, per_node), per_node) == fewest
    assert placeable(counts, num_devices, per_node) == (fewest == 0)


@given(tilings())
def test_what_is_placeable_is_placed_without_crossing(tiling):
    shapes, num_devices, per_node = tiling
    counts = counts_of(shapes)
    if placeable(counts, num_devices, per_node):
        assert num_crossing(place(counts, num_devices, per_node), per_node) == 0


@pytest.mark.parametrize("num_devices", [1, 2, 7, 8, 12, 16, 24])
def test_every_tiling_by_powers_of_two_is_placeable(num_devices):
    for number in range(1, 5):
        for degrees in combinations_with_replacement([1, 2, 4, 8, 16], number):
            rest = num_devices - sum(degrees)
            if rest < 0 or (max(degrees) > num_devices // 8 * 8 and num_devices > 8):
                continue
            counts = counts_of([(degree, 1) for degree in degrees] + [(1, 1)] * rest)
            assert placeable(counts, num_devices, 8)
            assert num_crossing(place(counts, num_devices, 8), 8) == 0


def test_stages_of_a_pipeline_share_a_node_where_they_can():
    placed = place(counts_of([(1, 4), (2, 2), (4, 2), (8, 1), (2, 4)]), 32, 8)
    assert all(num_nodes(ranks, 8) == 1 for _, ranks in placed)


def test_pipelines_larger_than_a_node_take_neighbouring_nodes():
    placed = place(counts_of([(4, 4), (8, 2), (8, 1)]), 40, 8)
    assert [ranks for _, ranks in placed] == [tuple(range(16)), tuple(range(16, 32)), tuple(range(32, 40))]


def test_only_pipelines_that_must_are_torn_apart():
    placed = place(counts_of([(3, 2), (5, 1), (5, 1), (2, 4)]), 24, 8)
    assert num_crossing(placed, 8) == 0
    assert [num_nodes(ranks, 8) for _, ranks in placed] == [2, 1, 1, 1]


def test_stages_larger_than_a_node_take_whole_nodes():
    placed = place(counts_of([(7, 1), (16, 1), (7, 1), (2, 1)]), 32, 8)
    sixteen = next(ranks for each, ranks in placed if each.num_devices == 16)
    assert num_nodes(sixteen, 8) == 2
    assert not placeable(counts_of([(7, 1), (16, 1), (7, 1), (2, 1)]), 32, 8)


def test_a_group_of_one_and_a_half_nodes_leaves_half_a_node_for_another():
    placed = place(counts_of([(12, 1), (12, 1)]), 24, 8)
    assert num_crossing(placed, 8) == 0


def test_one_device_is_one_pipeline():
    assert place([(candidate(1), 1)], 1, 8) == [(candidate(1), (0,))]


def test_a_thousand_single_device_nodes_are_filled_without_recursion():
    placed = place([(candidate(2), 512)], 1024, 1)
    assert sorted(rank for _, ranks in placed for rank in ranks) == list(range(1024))


def test_pipelines_that_do_not_tile_the_cluster_are_refused():
    with pytest.raises(InputError, match="occupy 6 devices, the cluster has 8"):
        place(counts_of([(2, 1), (4, 1)]), 8, 8)
