"""Statistics equal what a loop over the sequences counts."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.lengths import LengthIndex
from lengthwise.data.length_stats import attention_imbalance, length_stats, padding_share

lengths_lists = st.lists(st.integers(1, 200_000), min_size=1, max_size=60)


@given(lengths_lists)
def test_histogram_and_cuts_equal_a_loop(lengths):
    stats = length_stats(LengthIndex(lengths=np.array(lengths)))
    for bin in stats.histogram:
        inside = [length for length in lengths if bin.low <= length < (bin.high or 1 << 60)]
        assert bin.num_sequences == len(inside)
        assert bin.share_of_tokens == pytest.approx(sum(inside) / sum(lengths))
    assert sum(bin.num_sequences for bin in stats.histogram) == stats.num_sequences == len(lengths)
    for cut in stats.cuts:
        over = [length for length in lengths if length > cut.max_length]
        assert cut.sequences_over == len(over)
        assert cut.share_of_tokens_in_them == pytest.approx(sum(over) / sum(lengths))
        beyond = sum(length - cut.max_length for length in over)
        assert cut.share_of_tokens_beyond == pytest.approx(beyond / sum(lengths))
    assert json.loads(json.dumps(stats.to_json()))["max_length"] == max(lengths)


@given(lengths=lengths_lists, size=st.integers(1, 40))
def test_padding_equals_a_loop(lengths, size):
    batches = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    computed = sum(max(batch) * len(batch) for batch in batches)
    assert padding_share(np.array(lengths), batch_size=size) == pytest.approx(1 - sum(lengths) / computed)


@given(lengths=lengths_lists, num_ranks=st.integers(1, 9))
def test_imbalance_equals_a_loop_over_packs(lengths, num_ranks):
    packs = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > max(lengths):
            packs.append([])
        packs[-1].append(length)
    work = [sum(length**2 for length in pack) for pack in packs]
    steps = [work[at : at + num_ranks] for at in range(0, len(work), num_ranks)]
    steps = [step for step in steps if len(step) == num_ranks] or steps
    expected = sum(map(max, steps)) / (sum(map(sum, steps)) / num_ranks)
    found = attention_imbalance(np.array(lengths), num_ranks=num_ranks)
    assert found == pytest.approx(expected) and 1 - 1e-12 <= found <= num_ranks + 1e-9


def test_equal_lengths_waste_and_unbalance_nothing():
    stats = length_stats(LengthIndex(lengths=np.full(64, 2048)))
    assert stats.attention_imbalance == 1
    assert all(row.random_order == row.sorted_order == 0 for row in stats.padding)


def test_the_same_seed_gives_the_same_statistics():
    index = LengthIndex(lengths=np.arange(1, 1000))
    assert length_stats(index, seed=5) == length_stats(index, seed=5) != length_stats(index, seed=6)
