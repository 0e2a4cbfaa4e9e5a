"""Shape lattices: the least padding, exactly, and all that is said of it."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.data.size_buckets import packed_lattice, padded_lattice, round_down
from tests.examples import examples

TOKENS = st.lists(st.integers(1, 70), min_size=1, max_size=11)


def brute_force(tokens, *, most, multiple_of, largest=0):
    """The least padding of all ways to choose sizes."""
    rounded = sorted({-(-n // multiple_of) * multiple_of for n in [*tokens, *([largest] if largest else [])]})
    return min(
        sum(min(size for size in sizes if size >= n) - n for n in tokens)
        for count in range(1, min(most, len(rounded)) + 1)
        for sizes in combinations(rounded, count)
        if sizes[-1] == rounded[-1]
    )


@settings(max_examples=examples(150), deadline=None)
@given(TOKENS, st.integers(1, 4), st.integers(1, 9), st.integers(0, 90))
def test_no_choice_of_sizes_leaves_less_padding(tokens, most, multiple_of, largest):
    lattice = packed_lattice(tokens, most=most, multiple_of=multiple_of, largest=largest)
    assert lattice.num_padding == brute_force(tokens, most=most, multiple_of=multiple_of, largest=largest)
    assert lattice.num_padding == sum(lattice.size_of(n) - n for n in tokens)
    assert lattice.num_tokens == sum(tokens)
    assert len(lattice.sizes) <= most and list(lattice.sizes) == sorted(set(lattice.sizes))
    assert all(size % multiple_of == 0 for size in lattice.sizes)
    assert 0 <= lattice.sizes[-1] - max(*tokens, largest) < multiple_of


@settings(max_examples=examples(50), deadline=None)
@given(TOKENS, st.integers(1, 9))
def test_more_sizes_never_leave_more_padding_and_enough_leave_none(tokens, multiple_of):
    found = [packed_lattice(tokens, most=most, multiple_of=multiple_of).num_padding for most in range(1, 13)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == sum(-n % multiple_of for n in tokens)


def test_many_distinct_values_are_cut_where_the_sum_says():
    tokens = np.arange(1, 20_001)
    lattice = packed_lattice(tokens, most=4, multiple_of=1)
    assert lattice.sizes == (5_000, 10_000, 15_000, 20_000)
    assert lattice.num_padding == 4 * sum(range(5_000))
    assert lattice.waste == pytest.approx(lattice.num_padding / (lattice.num_padding + tokens.sum()))


def test_order_and_repetition_change_shares_not_the_choice():
    tokens = np.array([3, 900, 70, 70, 412])
    again = np.random.default_rng(0).permutation(np.repeat(tokens, 3))
    once, thrice = packed_lattice(tokens, most=2), packed_lattice(again, most=2)
    assert once.sizes == thrice.sizes and thrice.num_padding == 3 * once.num_padding and once.waste == thrice.waste


def test_padded_shapes_hold_as_many_rows_as_the_budget():
    lattice = padded_lattice([10, 60, 100, 500, 500], most=2, budget=1024)
    assert lattice.sizes == (128, 512)
    assert lattice.shapes == ((8, 128), (2, 512))
    assert lattice.num_padding == 118 + 68 + 28 + 12 + 12


def test_a_row_that_exceeds_the_budget_is_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"padded to 1,024 tokens, a batch holds 1,000"):
        padded_lattice([1000], most=2, budget=1000)


def test_what_no_size_holds_is_refused_with_number_and_limit():
    with pytest.raises(InputError, match=r"1,025 tokens .* holds, 1,024"):
        packed_lattice([1000], most=2).size_of(1025)


@pytest.mark.parametrize("bad", [{"most": 0}, {"most": 1, "multiple_of": 0}, {"most": 1, "num_tokens": []}])
def test_impossible_wishes_are_refused(bad):
    with pytest.raises(InputError, match="at least"):
        packed_lattice(bad.pop("num_tokens", [1]), **bad)


def test_rounding_down_finds_the_largest_size_within_a_limit():
    assert [round_down(limit, (64, 128)) for limit in (63, 64, 127, 500)] == [0, 64, 64, 128]
