import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.plan.solve.binpack import first_fit_decreasing


def naive(sizes, capacity):
    """The definition, in O(n^2)."""
    bins, room = [], []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for number in range(len(bins)):
            if room[number] >= sizes[item]:
                break
        else:
            bins.append([])
            room.append(capacity)
            number = len(bins) - 1
        bins[number].append(item)
        room[number] -= sizes[item]
    return bins


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_the_tree_finds_what_the_definition_finds(sizes, capacity):
    assert first_fit_decreasing(sizes, capacity) == naive(sizes, capacity)


def test_an_item_larger_than_a_bin_is_refused():
    with pytest.raises(ValueError, match="size 9 is larger than a bin of 8"):
        first_fit_decreasing([1, 9], 8)
