"""Units are as long as their members, which are sequences of their own."""

import numpy as np
import pytest

from lengthwise.core.batch import Pack
from lengthwise.runtime.wrap.unit_members import Units

UNITS = Units(offsets=np.array([0, 3, 6]), lengths=np.array([3, 1, 2, 4, 5, 6]))


def test_members_of_a_pack_come_unit_by_unit_with_all_padding_at_the_end():
    assert UNITS.members(Pack(ids=(1, 0), lengths=(15, 6))) == Pack(ids=(3, 4, 5, 0, 1, 2), lengths=(4, 5, 6, 3, 1, 2))
    padded = UNITS.members(Pack(ids=(1, 0), lengths=(15, 6), padded_to=16, filler=2))
    assert (padded.filler, padded.num_tokens, padded.padded_to) == (2 * 16 + 2 - 21, 2 * 16 + 2, 0)


@pytest.mark.parametrize(("sequence", "name"), [(0, "member 0 of item 0"), (5, "member 2 of item 1")])
def test_a_sequence_is_named_by_its_place_in_its_item(sequence, name):
    assert UNITS.name(sequence) == name


def test_more_sequences_than_there_are_members_are_of_no_whole_units():
    numbers, are_whole = UNITS.planned_units([3, 4, 5, 6, 7])
    assert numbers.tolist() == [0, 0, 0, 1, 1] and not are_whole
    assert UNITS.planned_units([0, 1, 2, 3, 4, 5])[1]
