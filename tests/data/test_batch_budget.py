"""Token budgets: what is computed stays within them, and no sequence is lost."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.data.batch_budget import Budget

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=50)
breaks_lists = st.lists(st.integers(0, 50), max_size=4)


def batches_of(cut):
    assert cut.ends[-1] == len(cut.lengths) and (np.diff(cut.ends, prepend=0) > 0).all(), "every sequence is in a batch"
    return [cut.lengths[start:end].tolist() for start, end in zip(cut.starts, cut.ends)]


def computed(batch, *, padded, micro_batches=1):
    rows = -(-len(batch) // micro_batches)
    return rows * max(batch) if padded else sum(batch)


def one_by_one(lengths, *, tokens, padded, most, breaks):
    """Batches that take one sequence after the other, while they may."""
    batches = [[]]
    for position, length in enumerate(lengths):
        longer = [*batches[-1], length]
        if batches[-1] and (
            position in breaks or (tokens and computed(longer, padded=padded) > tokens) or (most and len(longer) > most)
        ):
            batches.append([])
        batches[-1].append(length)
    return batches


@given(
    lengths=lengths_lists,
    tokens=st.one_of(st.none(), st.integers(1, 200)),
    most=st.one_of(st.none(), st.integers(1, 9)),
    padded=st.booleans(),
    breaks=breaks_lists,
)
def test_batches_take_what_follows_as_far_as_budget_number_and_breaks_allow(lengths, tokens, most, padded, breaks):
    if tokens is None and most is None:
        return
    breaks = sorted(at for at in breaks if at < len(lengths))
    cut = Budget(tokens=tokens, padded=padded, max_sequences=most).cut(np.array(lengths), breaks=np.array(breaks, int))
    found = batches_of(cut)
    assert found == one_by_one(lengths, tokens=tokens, padded=padded, most=most, breaks=breaks)
    assert cut.num_computed.tolist() == [computed(batch, padded=padded) for batch in found]
    assert cut.num_over == sum(tokens is not None and computed(batch, padded=padded) > tokens for batch in found)
    assert cut.padding == pytest.approx(1 - sum(lengths) / sum(computed(batch, padded=padded) for batch in found))


@given(lengths=lengths_lists, tokens=st.integers(1, 200), least=st.integers(2, 6), padded=st.booleans())
def test_batches_below_a_minimum_are_filled_where_the_budget_allows_and_else_kept(lengths, tokens, least, padded):
    limits = {"tokens": tokens, "padded": padded}
    plain = Budget(**limits).cut(np.array(lengths))
    cut = Budget(**limits, min_sequences=least).cut(np.array(lengths))
    found = batches_of(cut)
    assert all(computed(batch, padded=padded) <= tokens or len(batch) == 1 for batch in found)
    small = [len(batch) < least for batch in found]
    assert cut.num_small == sum(small) <= sum(len(batch) < least for batch in batches_of(plain))
    for before, batch, is_small in zip(found, found[1:], small[1:]):
        wanted = least - len(batch)
        if is_small and len(before) - wanted >= least:
            assert computed(before[-wanted:] + batch, padded=padded) > tokens


@given(
    lengths=lengths_lists,
    tokens=st.integers(1, 200),
    count=st.integers(1, 5),
    most=st.one_of(st.none(), st.integers(1, 4)),
)
def test_micro_batches_of_a_step_have_one_shape_and_rows_of_padding_at_the_end_alone(lengths, tokens, count, most):
    cut = Budget(tokens=tokens, padded=True, equal_shapes=count, max_sequences=most).cut(np.array(lengths))
    found = batches_of(cut)
    over = [max(batch) > tokens for batch in found]
    for number, batch in enumerate(found):
        rows, longest = int(cut.rows[number]), int(cut.longest[number])
        assert rows == -(-len(batch) // count) and longest == max(batch)
        assert cut.num_computed[number] == count * rows * longest
        assert rows * longest <= tokens or len(batch) == 1
        assert most is None or rows <= most
        beside_over = over[number] or (number + 1 < len(found) and over[number + 1])
        assert len(batch) % count == 0 or number == len(found) - 1 or beside_over
    assert cut.num_over == sum(over)


@pytest.mark.parametrize("padded", [False, True])
def test_what_published_batching_loses_is_kept(padded):
    four = Budget(tokens=20, padded=padded).cut(np.full(4, 5))
    assert batches_of(four) == [[5, 5, 5, 5]], "the last sequence of a dataset"
    lengths = np.full(1051, 8)
    lengths[50] = 100
    cut = Budget(tokens=100, padded=padded, min_sequences=2).cut(lengths)
    assert sum(map(len, batches_of(cut))) == 1051 and cut.num_small == 1, "what follows a batch below the minimum"
    lengths[50] = 1000
    cut = Budget(tokens=100, padded=padded).cut(lengths)
    assert [1000] in batches_of(cut) and cut.num_over == 1, "a sequence over the budget"


def test_padding_never_takes_a_batch_over_the_budget():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 5000).astype(int) + 1, 8192)
    cut = Budget(tokens=8192, padded=True).cut(lengths)
    assert cut.num_computed.max() <= 8192 and cut.num_over == 0
    sums = Budget(tokens=8192).cut(lengths)
    assert (sums.num_sequences * sums.longest).max() > 4 * 8192, "what a budget of sums comes to when it is padded"


def test_a_short_last_batch_is_filled_from_the_one_before():
    cut = Budget(tokens=10, min_sequences=3).cut(np.ones(21, int))
    assert cut.num_sequences.tolist() == [10, 8, 3] and cut.num_small == 0


def test_a_budget_says_what_it_is_in_plain_values():
    budget = Budget(tokens=10, padded=True, equal_shapes=2)
    assert Budget(**json.loads(json.dumps(budget.to_json()))) == budget


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "needs a limit"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 9, "min_sequences": 3, "max_sequences": 2}, "min_sequences=3 is more than max_sequences=2"),
        ({"tokens": 9, "equal_shapes": 2}, "equal_shapes needs padded"),
        ({"tokens": 9, "padded": True, "equal_shapes": 0}, "equal_shapes is 0"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        Budget(**wrong)
