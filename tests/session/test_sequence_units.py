"""Items of several sequences: told from rows of tokens, joined end to end, refused where members differ."""

import numpy as np
import pytest
import torch

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.session.item_values import ItemRow
from lengthwise.session.sequence_units import check_all_units, joined, members_of, units_named

MEMBER = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    "item",
    [
        MEMBER, np.array([1, 2]), "text", [1, 2], (1, 2), [], [[1, 2]], (torch.ones(3),),
        [torch.tensor(1), torch.tensor(2)], [*range(8), [9]],
    ],
)  # fmt: skip
def test_what_is_one_sequence_has_no_members(item):
    assert members_of("item 0", item, slot_tokens=1) is None


def test_films_of_frames_are_no_rows():
    assert members_of("item 0", [[1, 2], [3, 4]], slot_tokens=2) is None


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_tuple_or_list_of_dictionaries_is_a_unit(kind):
    assert members_of("item 0", kind([MEMBER] * 20), slot_tokens=1) == [MEMBER] * 20


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((MEMBER, [1]), "member 1 of item 0 is list, and others are dictionaries"),
        (([1], MEMBER), "member 0 of item 0 is list, and others are dictionaries"),
        ((*[MEMBER] * 10, 3), "member 10 of item 0 is int, and others are dictionaries"),
        (((MEMBER,), (MEMBER,)), "item 0 is a tuple of units"),
        ([[*[1] * 8, MEMBER], [1]], "item 0 is a list of 2 rows"),  # a long row is not read for dictionaries
        ([1, [2, MEMBER]], "item 0 is a list of units"),
        (([1, 2], [3]), "item 0 is a tuple of 2 rows"),
        ([1, (2, 3)], "item 0 is a list of 2 rows"),
        ([torch.ones(2), torch.ones(3)], "item 0 is a list of 2 rows"),
        ([np.ones(2), np.ones(3), np.ones(1)], "item 0 is a list of 3 rows"),
    ],
)
def test_what_is_neither_a_unit_nor_a_sequence_is_refused(item, said):
    with pytest.raises(InputError, match=said):
        members_of("item 0", item, slot_tokens=1)


def row(*tokens, **columns):
    return ItemRow(tokens=np.array(tokens), **columns)


def test_members_are_joined_end_to_end_with_all_their_columns():
    first = row(1, 2, labels=np.array([3, 4]), special=np.array([True, False]), passed={"types": np.array([5, 6])})
    second = row(7, labels=np.array([8]), special=np.array([False]), passed={"types": np.array([9])}, bounds=(0, 1))
    unit = joined("item 0", [first, second])
    assert unit.tokens.tolist() == [1, 2, 7] and unit.labels.tolist() == [3, 4, 8]
    assert unit.special.tolist() == [True, False, False] and unit.passed["types"].tolist() == [5, 6, 9]
    assert unit.bounds == (0, 2, 3) and unit.is_unit
    assert joined("item 0", [second]).bounds == (0, 1)
    plain = joined("item 0", [row(1), row(2, 3), row(4)])
    assert plain.labels is None and plain.special is None and not plain.passed and plain.bounds == (0, 1, 3, 4)


COLUMN = np.array([0])


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([row(1), row(1, 2, bounds=(0, 1, 2))], "member 1 of item 0 holds 2 sequences packed into one row"),
        ([row(1, labels=COLUMN), row(1)], r"member 0 of item 0 has labels \(or a mask.* and member 1 has none"),
        ([row(1), row(1), row(1, special=COLUMN)], "member 2 of item 0 has special_tokens_mask and member 0 has none"),
        ([row(1), row(1, passed={"types": COLUMN})], "member 1 of item 0 has types and member 0 has none"),
        ([row(1, passed=dict.fromkeys("ba", COLUMN)), row(1)], "member 0 of item 0 has a and member 1 has none"),
        ([row(1), row([1, 2])], r"member 1 of item 0 has slots of shape \(2,\), and member 0 has slots of shape \(\)"),
    ],
)
def test_members_that_differ_are_named(members, said):
    with pytest.raises(InputError, match=said):
        joined("item 0", members)


def test_all_items_are_units_or_none():
    for same in (False, True):
        check_all_units(5, same, same)
    with pytest.raises(InputError, match=r"item 5 is a single sequence, and item 0 is a unit; .* a tuple \(item,\)"):
        check_all_units(5, False, True)
    with pytest.raises(InputError, match="item 5 is a unit, and item 0 is a single sequence"):
        check_all_units(5, True, False)


def test_a_unit_that_fits_nowhere_is_said_to_be_one():
    error = InfeasibleError("sequence 7 needs more; set over_length=split.")
    with pytest.raises(InfeasibleError) as plain, units_named(None):
        raise error
    assert plain.value is error
    with (
        pytest.raises(InfeasibleError, match=r"^sequence 7 .* over_length=drop\. Items are units of 2 seq"),
        units_named(Units(offsets=np.array([0, 2]), lengths=np.array([1, 1]))),
    ):
        raise error
