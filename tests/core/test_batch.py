import pytest

from lengthwise.core.batch import MASKED, GlobalBatch, Pack, num_masked, num_targets
from lengthwise.core.errors import InputError


def test_pack_boundaries_start_at_zero_and_end_at_its_tokens():
    pack = Pack(ids=(4, 2), lengths=(3, 5))
    assert pack.cu_seqlens == (0, 3, 8)
    assert pack.num_tokens == 8
    assert pack.num_targets == 6


def test_padding_is_computed_but_never_a_target():
    pack = Pack(ids=(4, 2), lengths=(3, 5), padded_to=6)
    assert pack.cu_seqlens == (0, 6, 12)
    assert pack.num_targets == 6


def test_filler_brings_a_pack_to_a_size_in_sequences_of_its_own_no_longer_than_its_longest():
    pack = Pack(ids=(4, 2), lengths=(3, 5), filler=12)
    assert pack.computed_lengths == (3, 5, 5, 5, 2)
    assert pack.num_tokens == 20 and pack.num_targets == 6
    padded = Pack(ids=(4, 2), lengths=(3, 5), padded_to=6, rows=3, filler=6)
    assert padded.computed_lengths == (6, 6, 6, 6)
    assert padded.cu_seqlens == (0, 6, 12, 18, 24)


def test_of_each_sequence_15_percent_are_masked_and_at_least_one_token():
    assert [num_masked(length) for length in (1, 2, 10, 100, 1000)] == [1, 1, 2, 15, 150]
    batch = GlobalBatch(step=0, ids=(0, 1, 2), lengths=(1, 10, 100), objective=MASKED)
    assert batch.num_targets == 1 + 2 + 15 == num_targets(batch.lengths, objective=MASKED)
    assert GlobalBatch(step=0, ids=(0, 1, 2), lengths=(1, 10, 100)).num_targets == 0 + 9 + 99


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pack(ids=(1,), lengths=(3, 4)),
        lambda: Pack(ids=(), lengths=()),
        lambda: Pack(ids=(1,), lengths=(5,), padded_to=4),
        lambda: Pack(ids=(1, 2), lengths=(5, 5), padded_to=5, rows=1),
        lambda: Pack(ids=(1,), lengths=(5,), rows=2),
        lambda: Pack(ids=(1,), lengths=(5,), filler=-1),
        lambda: GlobalBatch(step=0, ids=(1,), lengths=()),
        lambda: GlobalBatch(step=0, ids=(), lengths=()),
        lambda: GlobalBatch(step=0, ids=(1, 7), lengths=(3, 0)),
        lambda: GlobalBatch(step=0, ids=(1,), lengths=(3,), objective="guess"),
    ],
)
def test_impossible_batches_are_refused(make):
    with pytest.raises(InputError):
        make()
