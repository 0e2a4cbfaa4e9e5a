"""Sums of slot values over each sequence of a micro-batch, whose slots several ranks may share.

Every rank of the group gets the same sums, and so makes the same loss of them. A rank's loss counts for 1 / p of it
(:mod:`lengthwise.runtime.loop.loss_weighing`), so the gradient of a sum on one rank stands for p of them, and nothing
is sent in the backward. What is sent in the forward is an exchange like those of attention, so a rank that cannot go on
stands in for itself.

t slots of this rank, s sequences of the micro-batch, p ranks that share it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.runtime.wrap.context import ForwardPass, PackShard
from lengthwise.runtime.wrap.exchange_script import ExchangeScript, Summed
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.zero_collectives import SAID, finish_forward, sum_exchanges

_ENDED, _LEFT = 2, 3
"""What ranks say in place of 1: that they sum no more values, and that they were left by an error."""


def sums_by_sequence(shard: PackShard, values: Tensor) -> Tensor:
    """Sum ``values`` [t, ...] or [1, t, ...] over each sequence: ``[s, ...]``, equal on every rank of the group.

    Two exchanges: of shapes, and of the sums. Without values, for lack of memory or on an earlier stage, what is
    returned stands for the sums.

    Raises:
        InputError: there is not one value for each slot of this rank, other ranks have values of another shape, or the
            micro-batch is a slice.
    """
    check_is_whole(shard, "per_sequence(values) sums over each")
    if isinstance(values, MissingTensor):
        finish_forward(shard, _begin(shard))
        return _missing_sums(shard, values)
    by_slot = _by_slot(values, shard.num_slots)
    forward, dtype = _begin(shard), torch.promote_types(by_slot.dtype, torch.float32)
    numbers = torch.from_numpy(sequence_numbers(shard)[shard.places]).to(by_slot.device)
    is_real = numbers >= 0  # what a model makes of padding may be anything
    count = num_sequences(shard) if shard.tree is None else len(shard.tree.parents)
    zeros = torch.zeros(count, *by_slot.shape[1:], dtype=dtype, device=by_slot.device)
    sums: Tensor = zeros.index_add(0, numbers[is_real], by_slot[is_real].to(dtype))
    if shard.group.size > 1 and _all_have(shard, sums):
        forward.script = ExchangeScript(calls={0: Summed(count=sums.numel(), dtype=dtype)})
        sums = _SumOverRanks.apply(sums, shard)
        forward.script = ExchangeScript(calls={0: Summed()})
    forward.ended = shard.num_exchanges
    return sums if shard.tree is None else _along_paths(sums, shard.tree)


def check_is_whole(shard: PackShard, what: str) -> None:
    """Raise ``InputError`` if a slice of a micro-batch is computed, for ``what`` needs all tokens of its sequences."""
    if shard.part is not None:
        raise InputError(
            f"this micro-batch is {len(shard.part.tokens):,} of the {shard.cu_seqlens[-1]:,} tokens of some sequences, "
            f"and {what}; leave slices='auto' out of prepare(...)"
        )


def _missing_sums(shard: PackShard, values: MissingTensor) -> MissingTensor:
    """What stands for the sums of such values."""
    count = num_sequences(shard) if shard.tree is None else len(shard.tree.leaves)
    try:
        further = _by_slot(values, shard.num_slots).shape[1:]
    except InputError:  # the rank that has values says so, if theirs are no better
        further = torch.Size(())
    dtype = torch.promote_types(values.dtype, torch.float32)
    return MissingTensor(count, *further, dtype=dtype, device=values.device)


def _along_paths(sums: Tensor, tree: PrefixTree) -> Tensor:
    """[M, ...] sums over sequences, of those over the segments of their prefix tree."""
    segments, members = (torch.from_numpy(numbers).to(sums.device) for numbers in tree.members)
    return sums.new_zeros(len(tree.leaves), *sums.shape[1:]).index_add(0, members, sums[segments])


def _all_have(shard: PackShard, sums: Tensor) -> bool:
    """Whether all ranks of the group have sums; one that has none ran out of memory, and the step is void.

    Raises:
        InputError: theirs have other shapes.
    """
    if sums.dim() > SAID - 2:
        raise InputError(f"per_sequence takes values with at most {SAID - 2} axes; got {sums.dim()}")
    dtype = 2 * sums.dtype.itemsize + sums.dtype.is_complex
    mine = [1, dtype, *sums.shape, *[0] * (SAID - 2 - sums.dim())]
    rows = _say(shard, mine)
    if any(row[0] != 1 for row in rows):
        return False
    other = next((rank for rank, row in enumerate(rows) if row != mine), None)
    if other is not None:
        theirs = [size for size in rows[other][2:] if size]
        raise InputError(
            f"per_sequence got values of {list(sums.shape[1:])} for each slot here and of {theirs[1:]} on rank "
            f"{shard.group.ranks[other]}, or of another dtype; ranks that share a micro-batch make the same calls"
        )
    return True


def end_sums(shard: PackShard, *, has_left: bool) -> None:
    """Wait until no rank of the group sums values of the micro-batch any more; every rank of it calls this.

    ``has_left``: this rank left what sums them, by an error; until the others are done, it says that it has no sums.
    """
    rows = [[0]] if shard.group.size > 1 else []
    while any(row[0] not in (_ENDED, _LEFT) for row in rows):
        rows = _say(shard, [_LEFT if has_left else _ENDED, *[0] * (SAID - 1)])


def _say(shard: PackShard, mine: list[int]) -> list[list[int]]:
    """What each rank of the group says of its sums, in ``SAID`` integers."""
    ((send, receive), _), *_ = sum_exchanges(Summed(), shard.group.size)
    said = shard.group.all_to_all(torch.tensor(mine * shard.group.size, device=shard.device), send, receive)
    rows: list[list[int]] = said.view(-1, SAID).tolist()
    return rows


def sequence_numbers(shard: PackShard) -> np.ndarray:
    """[T] the number in the micro-batch of each slot's sequence, or segment of a tree, from 0; -1 for padding."""
    if shard.tree is not None:
        is_member = np.isin(np.arange(len(shard.tree.parents)), shard.tree.members[0])
        return np.where(is_member, np.arange(len(is_member)), -1)[shard.tree.segments]
    padded = np.full(len(shard.cu_seqlens) - 1, -1)
    padded[: len(shard.ids)] = shard.ids
    numbers = np.where(padded >= 0, np.cumsum(padded >= 0) - 1, -1)
    return np.repeat(numbers, [end - start for start, end in pairwise(shard.cu_seqlens)])


def num_sequences(shard: PackShard) -> int:
    """The number s of sequences in the micro-batch."""
    if shard.tree is not None:
        return len(shard.tree.leaves)
    return sum(sequence >= 0 for sequence in shard.ids)


def _by_slot(values: Any, num_slots: int) -> Tensor:
    """Bring values of this rank's slots to the shape [t, ...]."""
    if not isinstance(values, Tensor):
        raise InputError(f"per_sequence takes a tensor with one value for each slot; got {type(values).__name__}")
    if values.dim() and len(values) == num_slots:
        return values
    if tuple(values.shape[:2]) == (1, num_slots):
        return values[0]
    raise InputError(
        f"per_sequence needs one value for each of the {num_slots} slots of this rank, [t, ...] or [1, t, ...]; got "
        f"{list(values.shape)}"
    )


def _begin(shard: PackShard) -> ForwardPass:
    forward = ForwardPass(script=ExchangeScript(calls={0: Summed()}), begun=shard.num_exchanges)
    shard.passes.append(forward)
    return forward


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, shard: PackShard) -> Tensor:
        ctx.size = shard.group.size
        counts = [sums.numel()] * ctx.size
        parts = shard.group.all_to_all(sums.flatten().repeat(ctx.size), counts, counts)
        return parts.view(ctx.size, *sums.shape).sum(0)  # in one order on every rank

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None


def own_slots(shard: PackShard, sequence_ids: Sequence[int]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each sequence its number, which of this rank's slots it has, and their positions in it."""
    offsets = shard.offsets[shard.places]
    if shard.tree is None:
        numbers = shard.sequences.cpu().numpy()
        masks = ((sequence, numbers == sequence) for sequence in sequence_ids)
    else:
        segments, paths = shard.tree.segments[shard.places], [shard.tree.paths[leaf] for leaf in shard.tree.leaves]
        masks = ((sequence, np.isin(segments, path)) for sequence, path in zip(sequence_ids, paths))
    for sequence, is_own in masks:
        yield sequence, np.flatnonzero(is_own), offsets[is_own]
