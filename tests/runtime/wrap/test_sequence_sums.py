"""Sums over each sequence of a micro-batch are equal on all ranks that share it, whatever slots they have."""

import numpy as np
import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.sequence_sums import num_sequences, sequence_numbers, share_of_rank, sums_by_sequence
from lengthwise.runtime.wrap.zero_collectives import SAID, finish_backward
from tests.runtime.loop.runs import shard_of
from tests.runtime.train.runs import local_world

LENGTHS, IDS = (5, 2, 9, 1, 6), (0, -1, 12, 3, -1)
"""Two of them are padding, one between sequences."""


def values_of(*shape):
    return torch.randn(sum(LENGTHS), *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def expected(values):
    parts = values.split(LENGTHS)
    return torch.stack([part.sum(0) for part, i in zip(parts, IDS) if i >= 0])


def test_slots_are_numbered_by_sequence_and_padding_has_no_number():
    shard = shard_of(LENGTHS, ids=IDS)
    assert sequence_numbers(shard).tolist() == [0] * 5 + [-1] * 2 + [1] * 9 + [2] + [-1] * 6
    assert num_sequences(shard) == 3
    assert sequence_numbers(shard_of((2, 3), ids=(7,))).tolist() == [0, 0, -1, -1, -1], "padding may have no id"


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_values_with_or_without_a_row_are_summed_in_float32_or_more(shape):
    values = values_of(*shape)
    shard = shard_of(LENGTHS, ids=IDS)
    torch.testing.assert_close(sums_by_sequence(shard, values), expected(values))
    torch.testing.assert_close(sums_by_sequence(shard, values[None]), expected(values))
    assert sums_by_sequence(shard, values.bfloat16()).dtype == torch.float32
    values[5:7] = float("nan")  # whatever a model makes of padding
    torch.testing.assert_close(sums_by_sequence(shard, values), expected(values))
    assert [forward.ended for forward in shard.passes] == [0] * 4 == [shard.num_exchanges] * 4, "one rank sends nothing"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "per_sequence takes a tensor with one value for each slot; got list"),
        (torch.ones(()), r"one value for each of the 23 slots of this rank, .* got \[\]"),
        (torch.ones(22), r"got \[22\]"),
        (torch.ones(2, 23), r"got \[2, 23\]"),
        (torch.ones(1, 22), r"got \[1, 22\]"),
    ],
)
def test_what_is_no_value_for_each_slot_is_refused(values, said):
    with pytest.raises(InputError, match=said):
        sums_by_sequence(shard_of(LENGTHS, ids=IDS), values)


def test_ranks_that_share_a_micro_batch_have_equal_sums_and_add_up_what_each_gives_them_in_the_backward(ranks):
    """Before it, ``torch.autograd.grad`` of what is the same on all ranks is that of one, and others are refused."""
    values = values_of(3)
    weights = torch.arange(9, dtype=torch.float64).view(3, 3)
    for sums, of_loop, gradient, refusals, places, num_sent in ranks(3).run(_summed, values, weights):
        torch.testing.assert_close(sums, expected(values))
        numbers = torch.tensor(sequence_numbers(shard_of(LENGTHS, ids=IDS)))[places]
        torch.testing.assert_close(of_loop, torch.where(numbers[:, None] >= 0, weights[numbers], 0.0))
        torch.testing.assert_close(gradient, torch.where(numbers[:, None] >= 0, (1 + 2 + 3) * weights[numbers], 0.0))
        assert "with other gradients on each of the ranks" in refusals[0]
        assert "create_graph=True asks for second derivatives of micro_batch.per_sequence" in refusals[1]
        assert "max_degree=1" in refusals[1] and num_sent == 1, "a rank that stood in would send one exchange"


def shard_here(**options):
    world = local_world()
    shard = shard_of(LENGTHS, ids=IDS, rank=world.rank, degree=world.size, **options)
    shard.group = world.groups.of(tuple(range(world.size)))
    return shard


def _summed(values, weights):
    shard = shard_here()
    own, refusals = values[shard.places].requires_grad_(), []
    sums = sums_by_sequence(shard, own)
    loss = (sums * weights).sum()
    (of_loop,) = torch.autograd.grad(share_of_rank(loss, shard), own, retain_graph=True)
    of_rank = loss * (1 + shard.group.rank)
    for made, options in ((of_rank, {"retain_graph": True}), (loss, {"create_graph": True})):
        with pytest.raises(InputError) as refused:
            torch.autograd.grad(made, own, **options)
        refusals.append(str(refused.value))
    shard.backward_begun = shard.num_exchanges
    of_rank.backward()
    num_sent = shard.num_exchanges - shard.backward_begun
    shard.backward_begun = None
    finish_backward(shard)  # as a rank does that did not come to its backward
    assert shard.num_exchanges - shard.backward_begun == num_sent
    return sums.detach(), of_loop, own.grad, refusals, shard.places, num_sent


def test_ranks_with_other_shapes_or_dtypes_are_told_from_one_another(ranks):
    for rank, (shapes, dtypes, axes) in enumerate(ranks(2).run(_refused)):
        assert f"got values of [{2 + rank}] for each slot here and of [{3 - rank}] on rank {1 - rank}" in shapes
        assert "or of another dtype" in dtypes
        assert f"at most {SAID - 2} axes; got {SAID - 1}" in axes


def _refused():
    shard, refusals = shard_here(), []
    num_slots, rank = shard.num_slots, shard.group.rank
    most = torch.ones(num_slots, *[1] * (SAID - 3))
    assert sums_by_sequence(shard, most).shape == (3, *[1] * (SAID - 3))
    for values in (
        torch.ones(num_slots, 2 + rank),
        torch.ones(num_slots, dtype=(torch.float64, torch.complex64)[rank]),
        most[..., None],
    ):
        with pytest.raises(InputError) as refused:
            sums_by_sequence(shard, values)
        refusals.append(str(refused.value))
    return refusals


def test_a_rank_without_memory_leaves_the_others_with_their_own_sums(ranks):
    """The step is void, and no rank waits."""
    for rank, (is_missing, ended) in enumerate(ranks(2).run(_without)):
        assert is_missing == (rank == 1) and ended == [True]


def _without():
    shard = shard_here()
    values = torch.ones(shard.num_slots) if shard.group.rank == 0 else MissingTensor()
    sums = sums_by_sequence(shard, values)
    if shard.group.rank == 0:
        own = np.bincount(sequence_numbers(shard)[shard.places] + 1, minlength=4)[1:]
        assert sums.tolist() == own.tolist()
    return isinstance(sums, MissingTensor), [forward.ended == shard.num_exchanges for forward in shard.passes]
