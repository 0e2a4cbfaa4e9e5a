import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex


def test_an_index_knows_its_totals_and_cannot_be_changed():
    mine = np.array([3, 9, 4], dtype=np.int32)
    index = LengthIndex(lengths=mine)
    assert (len(index), index.num_tokens, index.max_length) == (3, 16, 9)
    with pytest.raises(ValueError, match="read-only"):
        index.lengths[0] = 1
    mine[0] = 3  # the caller's own array stays the caller's


def test_tokens_of_many_long_sequences_do_not_overflow():
    assert LengthIndex(lengths=np.full(3, 2**31 - 1, dtype=np.int32)).num_tokens == 3 * (2**31 - 1)


def test_digests_depend_on_lengths_and_text_but_not_on_the_integer_type():
    lengths = np.array([3, 9, 4])
    digest = LengthIndex(lengths=lengths).digest
    assert digest == LengthIndex(lengths=lengths.astype(np.int16)).digest
    assert digest != LengthIndex(lengths=lengths[::-1]).digest
    assert digest != LengthIndex(lengths=lengths, corpus_digest="text").digest


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.array([], dtype=np.int64), "the corpus is empty"),
        (np.array([4, 0, 2]), "sequence 1 has length 0"),
        (np.array([4, -3]), "sequence 1 has length -3"),
        (np.array([4.0]), "one row of integers, not float64"),
        (np.array([[4]]), "of shape"),
    ],
)
def test_what_is_no_row_of_lengths_is_refused(lengths, message):
    with pytest.raises(InputError, match=message):
        LengthIndex(lengths=lengths)


def test_numbers_that_can_be_no_lengths_are_refused():
    with pytest.raises(InputError, match="sequence 1 has length 18,446,744,073,709,551,615"):
        LengthIndex(lengths=np.array([5, 2**64 - 1], dtype=np.uint64))
