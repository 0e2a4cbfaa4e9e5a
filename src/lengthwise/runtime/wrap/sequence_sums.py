"""Sums of slot values over each sequence of a micro-batch, whose slots several ranks may share.

Every rank of the group gets the same sums. What it makes of them is its share of the step's loss: 1 / p of a term that
is the same on every rank (:mod:`lengthwise.runtime.loop.loss_weighing`), or a sum over its own slots. So the backward
of a step adds up the gradients that all ranks give a sum. What is sent is an exchange like those of attention, so a
rank that cannot go on stands in for itself.

``torch.autograd.grad`` of a loop's own, before the step's backward, differentiates no share but a number that every
rank has: the gradient of a sum is then what one of them gives it, and refused where others give another.

t slots of this rank, s sequences of the micro-batch, p ranks that share it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lengthwise.config.setting_names import as_option
from lengthwise.core.errors import InputError, errors_spelt
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only
from lengthwise.runtime.wrap.context import ForwardPass, PackShard
from lengthwise.runtime.wrap.exchange_script import Event, ExchangeScript, Summed
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.zero_collectives import SAID, finish_forward, sum_exchanges

_HAS, _ENDED, _LEFT, _TRAINED = 1, 2, 3, 4
"""What ranks say: that they have sums, sum no more values, were left by an error, or have sums with a gradient."""
_BACKWARD: Event = ("backward", 0)
_SAME = 1e-4
"""Relative difference of gradients that are the same on all ranks, whose devices may round differently."""
_OTHER_GRADIENTS = (
    "torch.autograd.grad came to micro_batch.per_sequence(values) with other gradients on each of the ranks that share "
    "the micro-batch, as from a term of a rank's own slots: differentiate what is the same on all of them, such as a "
    f"loss of sequences, or {SHARED}; in step.backward both are exact"
)


def sums_by_sequence(shard: PackShard, values: Tensor) -> Tensor:
    """Sum ``values`` [t, ...] or [1, t, ...] over each sequence: ``[s, ...]``, equal on every rank of the group.

    Two exchanges: of shapes, and of the sums; one in the backward, of their gradients. Without values, for lack of
    memory or on an earlier stage, what is returned stands for the sums.

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
    if shard.group.size > 1 and (said := _said_by_all(shard, sums)):
        if _TRAINED in said and not sums.requires_grad:  # of a rank whose values do not depend on weights
            sums.requires_grad_()
        forward.script = ExchangeScript(calls={0: Summed(count=sums.numel(), dtype=dtype)})
        sums = _SumOverRanks.apply(sums, shard)
        forward.script = ExchangeScript(calls={0: Summed()})
        if sums.requires_grad:
            _note_backward(forward, sums)
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


def _said_by_all(shard: PackShard, sums: Tensor) -> set[int]:
    """What the ranks of the group say of their sums; nothing if one has none: it ran out of memory, the step is void.

    Raises:
        InputError: theirs have other shapes.
    """
    if sums.dim() > SAID - 2:
        raise InputError(f"per_sequence takes values with at most {SAID - 2} axes; got {sums.dim()}")
    dtype = 2 * sums.dtype.itemsize + sums.dtype.is_complex
    mine = [_TRAINED if sums.requires_grad else _HAS, dtype, *sums.shape, *[0] * (SAID - 2 - sums.dim())]
    rows = _say(shard, mine)
    said = {row[0] for row in rows}
    if not said <= {_HAS, _TRAINED}:
        return set()
    other = next((rank for rank, row in enumerate(rows) if row[1:] != mine[1:]), None)
    if other is not None:
        theirs = [size for size in rows[other][2:] if size]
        raise InputError(
            f"per_sequence got values of {list(sums.shape[1:])} for each slot here and of {theirs[1:]} on rank "
            f"{shard.group.ranks[other]}, or of another dtype; ranks that share a micro-batch make the same calls"
        )
    return said


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


def _note_backward(forward: ForwardPass, sums: Tensor) -> None:
    """Note that every rank exchanges the gradients of ``sums`` in the backward, whatever its loss depends on."""
    forward.roots = ((get_gradient_edge(sums), sums.new_zeros(()).expand(sums.shape)),)
    call, events = Summed(count=sums.numel(), dtype=sums.dtype), (_BACKWARD,)
    forward.backward_script = ExchangeScript(calls={0: call}, without_recompute=events, with_recompute=events)


def _begin(shard: PackShard) -> ForwardPass:
    forward = ForwardPass(script=ExchangeScript(calls={0: Summed()}), begun=shard.num_exchanges)
    shard.passes.append(forward)
    return forward


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, shard: PackShard) -> Tensor:
        ctx.shard = shard
        return _of_all_ranks(shard, sums).sum(0)  # in one order on every rank

    @staticmethod
    @first_derivative_only("micro_batch.per_sequence where ranks share a sequence", SHARED)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shard: PackShard = ctx.shard
        of_ranks = _of_all_ranks(shard, gradients[0])
        if shard.backward_begun is not None:
            return of_ranks.sum(0), None
        if not all(torch.allclose(other, of_ranks[0], rtol=_SAME, atol=0.0, equal_nan=True) for other in of_ranks):
            with errors_spelt(as_option):
                raise InputError(_OTHER_GRADIENTS)
        return of_ranks[0], None


class _ShareOfRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, shard: PackShard) -> Tensor:
        ctx.shard = shard
        return value / shard.group.size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shard: PackShard = ctx.shard
        return (gradients[0] if shard.backward_begun is None else gradients[0] / shard.group.size), None


def share_of_rank(value: Tensor, shard: PackShard) -> Tensor:
    """A rank's share, 1 / p, of a number that is made of sums by sequence and so the same on all of them.

    A loop's own ``torch.autograd.grad`` of it is that of the number: each rank has the gradient of its own slots.
    """
    share: Tensor = _ShareOfRank.apply(value, shard)
    return share


def _of_all_ranks(shard: PackShard, values: Tensor) -> Tensor:
    """[p, s, ...] the values [s, ...] of each rank of the group. One exchange."""
    size = shard.group.size
    counts = [values.numel()] * size
    parts: Tensor = shard.group.all_to_all(values.flatten().repeat(size), counts, counts)
    return parts.view(size, *values.shape)


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
