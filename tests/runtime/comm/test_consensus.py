"""Ranks that were started differently are refused before they train, with the keys, the values and the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.consensus import require_equal
from lengthwise.runtime.comm.differences import MOST_TOLD, differences, digest_of, message_of, ranks_text
from lengthwise.runtime.comm.objects import broadcast_json, gather_json
from lengthwise.runtime.comm.world import start_world

TREES = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.integers(0, 2) | st.dictionaries(st.just("d"), st.booleans())
)


@given(TREES, TREES)
def test_digests_are_equal_exactly_where_nothing_differs(one, other):
    assert (digest_of(one) == digest_of(other)) == (differences({0: one, 1: other}) == [])


def test_the_order_of_keys_is_no_difference_and_an_empty_tree_is_one():
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert digest_of(one) == digest_of(other) and not differences({0: one, 1: other})
    (difference,) = differences({0: {"a": {}}, 1: {}})
    assert str(difference) == "a is {} on rank 0, not set on rank 1"
    assert digest_of({"a": {}}) != digest_of({})


def test_a_difference_names_the_key_and_the_ranks_of_each_value():
    values = {rank: {"optim": {"lr": 0.1 if rank in (0, 3) else 0.2, "name": "sgd"}} for rank in range(6)}
    del values[5]["optim"]["lr"]
    (found,) = differences(values)
    assert str(found) == "optim.lr is 0.1 on ranks 0 and 3, 0.2 on ranks 1-2 and 4, not set on rank 5"


def test_a_message_lists_a_few_differences_and_counts_the_rest():
    trees = {rank: {f"key{number:02}": rank * number for number in range(1, 21)} for rank in range(2)}
    message = message_of(differences(trees))
    assert message.count(" on rank 1") == MOST_TOLD and f"and {20 - MOST_TOLD} more" in message


@pytest.mark.parametrize(("key", "is_seeded"), [("parameters", True), ("buffers", True), ("training", False)])
def test_ranks_that_draw_random_weights_of_their_own_are_advised_to_seed_them(key, is_seeded):
    trees = {rank: {"model": {key: {"head.weight": rank}} if is_seeded else {key: rank}} for rank in range(2)}
    assert ("torch.manual_seed(0)" in message_of(differences(trees))) == is_seeded
    others = {rank: tree | {"seed": rank} for rank, tree in trees.items()}
    assert "torch.manual_seed" not in message_of(differences(others)), "the seed is told, and is the reason"


def test_a_message_about_weights_begins_with_the_way_out_and_names_three():
    names = [f"layers.{number}.attention.query.weight" for number in range(40)]
    trees = {
        rank: {"model": {"parameters": {name: f"trained, float32 [64, 64], checksum {rank}{name}" for name in names}}}
        for rank in range(8)
    }
    message = message_of(differences(trees))
    assert len(message) < 350 and message.index("torch.manual_seed(0)") < message.index(names[0])
    assert sum(name in message for name in names) == 3 and "and 37 more" in message
    trees[1]["model"]["parameters"][names[0]] = "frozen, float32 [64, 64], checksum 0"
    assert 'is "trained, float32' in message_of(differences(trees)), "seeding does not freeze a parameter"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "rank 3"), ((0, 1), "ranks 0-1"), ((5, 0, 2, 1), "ranks 0-2 and 5"), ((1, 3, 5), "ranks 1, 3 and 5")],
)
def test_ranks_are_listed_shortly(ranks, text):
    assert ranks_text(ranks) == text


PAIRS = [
    ({"train": {"steps": 6}}, {"train": {"steps": 7}}, "train.steps is 6 on ranks 0 and 2, 7 on rank 1"),
    ({"weights": {"x": "ab"}}, {"weights": {"x": "cd"}}, 'weights.x is "ab" on ranks 0 and 2, "cd" on rank 1'),
    ({"a": 1}, {}, "a is 1 on ranks 0 and 2, not set on rank 1"),
    ({"betas": [0.9, 0.95]}, {"betas": [0.9, 0.99]}, "betas is [0.9, 0.95] on ranks 0 and 2, [0.9, 0.99] on rank 1"),
    ({"lr": 1.0}, {"lr": 1.0 + 2.0**-52}, "lr is 1.0 on ranks 0 and 2, 1.0000000000000002 on rank 1"),
]


def test_every_rank_is_told_the_same_of_what_differs(ranks):
    same = {"a": [1, 2], "b": {"c": None, "d": "ü" * 100}}
    for told in ranks(3).run(_compared, [*PAIRS, (same, same, "")]):
        assert [text in message for text, message in zip([expected for *_, expected in PAIRS], told)] == [True] * 5
        assert told[-1] == "", "nothing differs"


def _compared(pairs):
    world = start_world("cpu")
    messages = []
    for values, others, _ in pairs:
        try:
            require_equal(world, others if world.rank == 1 else values)
            messages.append("")
        except InputError as error:
            messages.append(str(error))
    return messages


def test_values_of_any_length_come_whole(ranks):
    expected = [{"rank": rank, "text": "é" * 1000 * rank, "none": None} for rank in range(3)]
    for gathered, broadcast in ranks(3).run(_exchanged):
        assert gathered == expected and broadcast == expected[0]


def _exchanged():
    world = start_world("cpu")
    value = {"rank": world.rank, "text": "é" * 1000 * world.rank, "none": None}
    return gather_json(world, value), broadcast_json(world, value)
