import pytest

from lengthwise.core.batch import GlobalBatch, Pack
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pack(ids=(1,), lengths=(3, 4)),
        lambda: Pack(ids=(), lengths=()),
        lambda: Pack(ids=(1,), lengths=(5,), padded_to=4),
        lambda: GlobalBatch(step=0, ids=(1,), lengths=()),
        lambda: GlobalBatch(step=0, ids=(), lengths=()),
        lambda: GlobalBatch(step=0, ids=(1, 7), lengths=(3, 0)),
    ],
)
def test_impossible_batches_are_refused(make):
    with pytest.raises(InputError):
        make()
