"""Parts of a tree: each within the limit, all leaves once, and no partition that repeats less of the tree."""

import numpy as np
import pytest

from lengthwise.plan.solve.tree_parts import cut_tree, fewest_repeated


def random_tree(rng, num_leaves, *, is_deep):
    """Sizes of nodes, and for each leaf the nodes from a root to it."""
    sizes, inner = [int(rng.integers(1, 30))], [(0,)]
    for _ in range(int(rng.integers(0, 4)) * is_deep):
        sizes.append(int(rng.integers(1, 30)))
        inner.append((*inner[int(rng.integers(len(inner)))], len(sizes) - 1))
    paths = []
    for _ in range(num_leaves):
        sizes.append(int(rng.integers(1, 40)))
        paths.append((*inner[int(rng.integers(len(inner)))], len(sizes) - 1))
    return sizes, paths


def size_of(part, sizes, paths):
    return sum(sizes[node] for node in {node for leaf in part for node in paths[leaf]})


def partitions(leaves):
    """All ways to put leaves into parts."""
    if not leaves:
        yield []
        return
    first, *rest = leaves
    for parts in partitions(rest):
        yield [[first], *parts]
        for number, part in enumerate(parts):
            yield [*parts[:number], [first, *part], *parts[number + 1 :]]


@pytest.mark.parametrize("is_deep", [False, True])
def test_no_partition_within_the_limit_repeats_less(is_deep):
    rng = np.random.default_rng(is_deep)
    for _ in range(40):
        sizes, paths = random_tree(rng, int(rng.integers(1, 7)), is_deep=is_deep)
        used = size_of(range(len(paths)), sizes, paths)
        longest = max(size_of([leaf], sizes, paths) for leaf in range(len(paths)))
        limit = int(rng.integers(longest, max(longest, used) + 1))
        least = min(
            sum(of_parts) - used
            for parts in partitions(list(range(len(paths))))
            if max(of_parts := [size_of(part, sizes, paths) for part in parts]) <= limit
        )
        found = cut_tree(sizes, paths, limit)
        assert found.repeated == least and found.is_optimal
        assert sorted(leaf for part in found.parts for leaf in part) == list(range(len(paths)))
        assert max(size_of(part, sizes, paths) for part in found.parts) <= limit
        assert sum(size_of(part, sizes, paths) for part in found.parts) == used + found.repeated
        assert fewest_repeated(sizes, paths, limit) <= least


def test_sixteen_branches_are_cut_within_the_limit_however_long_a_proof_would_take():
    rng = np.random.default_rng(2)
    for _ in range(10):
        sizes, paths = random_tree(rng, 16, is_deep=True)
        limit = 10 + max(size_of([leaf], sizes, paths) for leaf in range(16))
        found = cut_tree(sizes, paths, limit)
        assert max(size_of(part, sizes, paths) for part in found.parts) <= limit
        assert sorted(leaf for part in found.parts for leaf in part) == list(range(16))
        assert found.repeated >= fewest_repeated(sizes, paths, limit)


def test_a_leaf_that_is_longer_than_the_limit_has_no_parts():
    assert cut_tree([5, 6, 1], [(0, 1), (0, 2)], 10) is None
