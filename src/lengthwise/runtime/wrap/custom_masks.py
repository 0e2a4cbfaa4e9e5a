"""Attention masks of custom models, learned as tables over the positions in a sequence.

What such a model makes for a pack, or for a rank's part of it, is not what it makes for a sequence: its windows,
strides and biases follow the indices of what it is given. So the model computes one whole sequence alone, without
attention, and the mask of every call is kept: the longest so far. Shorter sequences have its first rows and columns,
which is checked whenever a mask of another length is seen; where it does not hold, the model is refused.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.context import PackShard

MOST_NUMBERS = 1 << 28
"""Most numbers in a table that is neither causal nor open."""
_ANY = 1 << 62
"""The size of a window side that is open."""
FINENESS = 1.25
"""A length is known where the mask of one at most this many times shorter was seen."""


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The mask of an attention call for the longest sequence seen so far."""

    length: int
    before: int = 0
    after: int = 0
    """How many slots before and after its own each slot sees, where there are no ``values``."""
    values: Tensor | None = field(default=None, repr=False)
    """[1 or heads, length, length]: booleans, or what is added to the logits."""

    def corner(self, length: int, like: Tensor) -> Tensor:
        """The mask of a shorter sequence, [1 or heads, length, length]."""
        if self.values is not None:
            return self.values[:, :length, :length]
        return _band(length, self.before, self.after, like.device)


class MaskTables:
    """The masks of a model's attention calls, by their numbers in its forward."""

    def __init__(self, model: str) -> None:
        """``model``: its name, for messages."""
        self._model = model
        self._by_dtype: dict[torch.dtype | None, tuple[dict[int, _Table], set[int]]] = {}
        self.use(None)
        self._checked: tuple[Tensor | None, PackShard | None, int] = (None, None, -1)

    def __bool__(self) -> bool:
        return any(tables for tables, _ in self._by_dtype.values())

    @property
    def num_lengths(self) -> int:
        """How many lengths masks were seen of."""
        return len(self._lengths)

    def use(self, dtype: torch.dtype | None) -> None:
        """Switch to the tables for a model that computes in ``dtype``, on which biases may depend."""
        self._tables, self._lengths = self._by_dtype.setdefault(dtype, ({}, set()))

    def is_known(self, length: int) -> bool:
        """Whether masks of about this length were seen."""
        longest = max((table.length for table in self._tables.values()), default=0)
        return length <= longest and any(length / FINENESS <= seen <= length * FINENESS for seen in self._lengths)

    def note(self, number: int, mask: Tensor, query_shape: tuple[int, ...]) -> None:
        """Record the mask of a call for one whole sequence.

        Raises:
            InputError: it is no function of the positions, or too large to keep.
        """
        values = self._plain(number, mask, query_shape)
        length = values.shape[-1]
        self._lengths.add(length)
        new, old = self._made(number, values), self._tables.get(number)
        if old is not None:
            short = min(old.length, length)
            if not _equal(old.corner(short, values), values[:, :short, :short]):
                raise InputError(
                    f"attention call {number} of {self._model} masks the first {short} slots of a sequence otherwise "
                    f"where it has {max(old.length, length)} than where it has {short}, so its mask follows from more "
                    "than positions and cannot be honoured on packs"
                )
        if old is None or length > old.length:
            self._tables[number] = new

    def _plain(self, number: int, mask: Tensor, query_shape: tuple[int, ...]) -> Tensor:
        """Reduce a mask to [1 or heads, L, L]."""
        if mask.requires_grad:
            raise InputError(
                f"attention call {number} of {self._model} adds a bias that is trained, which cannot be honoured on "
                "packs"
            )
        length = query_shape[-2]
        values = mask.detach()[(None,) * max(0, 3 - mask.dim())]
        leading = values.shape[:-3]
        if any(size != 1 for size in leading) and not _equal(values, values[(slice(0, 1),) * len(leading)]):
            raise InputError(
                f"attention call {number} of {self._model} has a mask {tuple(mask.shape)} with other values in every "
                "row, which cannot be honoured on packs"
            )
        values = values[(0,) * len(leading)]
        return _relative(values.expand(len(values), length, length))

    def _made(self, number: int, values: Tensor) -> _Table:
        length = values.shape[-1]
        seen = values if values.dtype == torch.bool else values == 0
        is_binary = values.dtype == torch.bool or bool((seen | (values <= torch.finfo(values.dtype).min / 2)).all())
        if is_binary:
            before, after = (_ANY if size == length - 1 else size for size in _reach(seen))
            if bool((seen == _band(length, before, after, seen.device)).all()):
                return _Table(length=length, before=before, after=after)
        other = self._tables.get(number - 1)
        if other is not None and other.values is not None and other.length == length and _equal(other.values, values):
            return other  # layers share it
        if values.numel() > MOST_NUMBERS:
            raise InputError(
                f"attention call {number} of {self._model} has a mask of {values.numel():,} numbers for a sequence of "
                f"{length:,} slots (limit {MOST_NUMBERS:,}); set max_length={int((MOST_NUMBERS / len(values)) ** 0.5)}"
            )
        return _Table(length=length, values=(seen if is_binary else values).clone())

    def kind(self, number: int, mask: Tensor | None, shard: PackShard) -> dict[str, Any]:
        """The mask of call ``number`` for the sequences of a pack, as options of :class:`AttentionRequest`.

        Raises:
            InputError: what it was given for this rank's slots does not follow from the positions.
        """
        table = self._tables[number]
        if mask is not None:
            self._check(number, mask, table, shard)
        if table.values is not None:
            if table.length < shard.longest:
                raise InputError(
                    f"attention call {number} of {self._model} has a mask that is known for {table.length} slots, not "
                    f"for {shard.longest}; compute micro-batches of a prepared run alone"
                )
            return {"causal": False, "mask": partial(_part, table.values)}
        is_open = table.before == _ANY and table.after in (0, _ANY)
        return {"causal": table.after == 0, "window": None if is_open else (table.before, table.after)}

    def check_band(self, number: int, mask: Tensor, shard: PackShard, *, causal: bool) -> None:
        """Raise ``InputError`` unless a mask, of a call that has none for a sequence alone, only parts sequences."""
        self._check(number, mask, _Table(length=shard.longest, before=_ANY, after=0 if causal else _ANY), shard)

    def _check(self, number: int, mask: Tensor, table: _Table, shard: PackShard) -> None:
        """Check that a mask given for a pack follows from indices or from positions, as far as the table goes."""
        checked, of_shard, of_table = self._checked
        if checked is mask and of_shard is shard and of_table == id(table):
            return
        values = mask.detach()[(None,) * max(0, 3 - mask.dim())].flatten(0, -3)
        t = min([shard.num_slots, *(size for size in mask.shape[-2:] if size > 1)])
        values = values.expand(len(values), t, t)
        short = min(t, table.length)
        # the corner alone first: all of a pack is the square of its slots, for every head
        if not _equal(_relative(values[:, :short, :short]), table.corner(short, values)):
            values = _relative(values)
            positions, sequences = shard.positions[:t], _numbers(shard)[:t]
            full_mask = table.corner(table.length, values)
            expected = full_mask[:, positions][:, :, positions]
            same_sequence = (sequences[:, None] == sequences).expand_as(values)
            if not _equal(values[same_sequence], expected.expand_as(values)[same_sequence]):
                raise InputError(
                    f"attention call {number} of {self._model} was given another mask for a pack than follows from "
                    "the positions in its sequences: it depends on tokens, or on the length, which cannot be honoured "
                    "on packs"
                )
        self._checked = mask, shard, id(table)


def _part(values: Tensor, number: int, heads: range, queries: range, keys: range) -> Tensor:
    part = values[:, queries.start : queries.stop, keys.start : keys.stop]
    return part[0] if len(values) == 1 else part[[head % len(values) for head in heads]]


def _numbers(shard: PackShard) -> Tensor:
    """[t] the number in the pack of the sequence, or padding, that each slot of this rank is in."""
    ends = torch.tensor(shard.cu_seqlens[1:])
    return torch.bucketize(torch.from_numpy(shard.places), ends, right=True).to(shard.device)


def _relative(values: Tensor) -> Tensor:
    """Subtract from biases that of each slot with itself, on which attention weights do not depend."""
    if values.dtype == torch.bool:
        return values
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    is_seen = bool((diagonal > torch.finfo(values.dtype).min / 2).all())
    return values - diagonal[..., None] if is_seen and bool(diagonal.any()) else values


def _reach(seen: Tensor) -> tuple[int, int]:
    """How far before its own the last slot sees, and how far after its own the first does."""
    return int(seen[0, -1].sum()) - 1, int(seen[0, 0].sum()) - 1


def _band(length: int, before: int, after: int, device: torch.device) -> Tensor:
    """The mask of a causal or windowed attention, [1, length, length]."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return ((distance <= before) & (distance >= -after))[None]


def _added(seen: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=like.dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two masks are equal; any large negative number hides."""
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return bool((first == second).all())
    like = first if first.dtype != torch.bool else second
    first, second = (x if x.dtype != torch.bool else _added(x, like) for x in (first, second))
    limit = torch.finfo(like.dtype).min / 2
    return bool(((first == second) | ((first <= limit) & (second <= limit))).all())
