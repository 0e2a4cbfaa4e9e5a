"""Prefix trees: what sequences share is laid out once, and every sequence is found in it."""

import numpy as np
import pytest

from lengthwise.core.prefix_tree import ROOT, PrefixTree, in_pack, prefix_tree


def random_sequences(rng):
    rows, may_share = [], []
    for _ in range(rng.integers(1, 6)):
        length = rng.integers(1, 9)
        rows.append({"tokens": rng.integers(0, 2, length), "types": np.zeros((length, 2), int) + (rng.random() < 0.2)})
        may_share.append(rng.random(length) < 0.9)
    return rows, may_share


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_is_found_and_what_is_equal_is_there_once(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        rows, may_share = random_sequences(rng)
        tree, tokens = prefix_tree(rows, may_share), [row["tokens"] for row in rows]
        prefixes = set()
        for member, row in enumerate(rows):
            slots, is_shared = tree.slots_of(member), True
            np.testing.assert_array_equal(tree.first(tokens)[slots], row["tokens"])
            np.testing.assert_array_equal(tree.positions[slots], np.arange(len(slots)))
            for place in range(len(slots)):
                is_shared = is_shared and may_share[member][place] and place + 1 < len(slots)
                prefix = np.column_stack([row["tokens"], row["types"]])[: place + 1].tobytes()
                prefixes.add((prefix if is_shared else member, place))
        assert len(prefixes) == tree.num_slots
        assert tree.lengths.tolist() == list(map(len, tokens))


def test_segments_follow_what_they_continue_at_once():
    rng = np.random.default_rng(1)
    for _ in range(200):
        tree = prefix_tree(*random_sequences(rng))
        for segment, end in enumerate(tree.ends):
            continued = [other for other, path in enumerate(tree.paths) if segment in path]
            assert continued == list(range(segment, end))


def test_values_of_shared_slots_are_means_and_sums_over_their_sequences():
    rows = [{"tokens": np.array(tokens)} for tokens in ([1, 2, 3], [1, 2, 4, 5], [7, 2])]
    tree = prefix_tree(rows, [np.ones(len(row["tokens"]), bool) for row in rows])
    assert tree.bounds == (0, 2, 3, 5, 7) and tree.parents == (ROOT, 0, 0, ROOT) and tree.leaves == (1, 2, 3)
    np.testing.assert_array_equal(tree.mean([np.arange(3), 2 + np.arange(4), np.zeros(2)]), [1, 2, 2, 4, 5, 0, 0])
    np.testing.assert_array_equal(tree.mean([np.arange(3), 1 + np.arange(4), np.zeros(2, int)])[:2], [0.5, 1.5])
    np.testing.assert_array_equal(tree.summed(1.0 / tree.lengths)[[0, 2, 3, 5]], [1 / 3 + 1 / 4, 1 / 3, 1 / 4, 1 / 2])
    packed = in_pack([tree, None, tree], (0, 7, 9, 16))
    assert packed.parents == (ROOT, 0, 0, ROOT, ROOT, ROOT, 5, 5, ROOT)
    assert packed.leaves == (1, 2, 3, 6, 7, 8) and packed.positions[7:].tolist() == [0, 1, 0, 1, 2, 2, 3, 0, 1]


def test_one_sequence_is_a_tree_of_one_segment():
    tree = prefix_tree([{"tokens": np.arange(5)}], [np.ones(5, bool)])
    assert (tree.bounds, tree.parents, tree.leaves) == ((0, 5), (ROOT,), (0,))
    assert isinstance(tree, PrefixTree)
