"""Layouts and transfers are pure integers; every property is checked against a plain list of owners."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.layout import Layout, fully_sharded, replicated, transfers


@st.composite
def ownerships(draw):
    """A layout in which every element has one owner, drawn element by element."""
    owners = draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
    intervals = [[] for _ in range(5)]
    for element, owner in enumerate(owners):
        held = intervals[owner]
        if held and held[-1][1] == element:
            held[-1] = (held[-1][0], element + 1)
        else:
            held.append((element, element + 1))
    return Layout(num_elements=len(owners), intervals=tuple(tuple(held) for held in intervals))


def elements(layout, rank):
    return [e for start, end in layout.intervals[rank] for e in range(start, end)]


@given(ownerships(), ownerships())
def test_transfers_give_each_rank_exactly_what_it_shall_hold(source, target):
    if source.num_elements != target.num_elements:
        with pytest.raises(InputError, match="cannot become"):
            transfers(source, target)
        return
    received = [[] for _ in range(5)]
    for move in transfers(source, target):
        assert set(range(move.start, move.end)) <= set(elements(source, move.source))
        received[move.target] += range(move.start, move.end)
    assert received == [elements(target, rank) for rank in range(5)]


@given(ownerships())
def test_a_layout_moves_nothing_to_itself(layout):
    assert all(move.source == move.target for move in transfers(layout, layout))


@given(st.integers(0, 200), st.integers(1, 9))
def test_full_sharding_owns_each_element_once_in_chunks_of_one_size(num_elements, num_ranks):
    layout = fully_sharded(num_elements, num_ranks)
    assert layout.owns_each_element_once
    held = [layout.num_held(rank) for rank in range(num_ranks)]
    assert sum(held) == num_elements
    assert all(before >= after for before, after in pairwise(held))
    assert max(held) - held[0] == 0


@given(st.integers(1, 200), st.integers(1, 9))
def test_pulling_whole_weights_is_an_all_gather(num_elements, num_ranks):
    moves = transfers(fully_sharded(num_elements, num_ranks), replicated(num_elements, num_ranks))
    per_rank = {rank: sum(m.num_elements for m in moves if m.target == rank) for rank in range(num_ranks)}
    assert set(per_rank.values()) == {num_elements}
    sent = sum(m.num_elements for m in moves if m.source != m.target)
    assert sent == num_elements * (num_ranks - 1)


@pytest.mark.parametrize("intervals", [((0, 2), (1, 3)), ((2, 2),), ((3, 5),), ((-1, 1),)])
def test_intervals_that_overlap_or_leave_the_buffer_are_refused(intervals):
    with pytest.raises(InputError, match="rank 0: interval"):
        Layout(num_elements=4, intervals=(intervals,))


def test_a_source_that_misses_an_element_is_refused():
    with pytest.raises(InputError, match="exactly once"):
        transfers(Layout(num_elements=2, intervals=(((0, 1),),)), replicated(2, 1))
