"""Attention masks of custom models, learned as tables over the positions in a sequence.

What such a model makes for a pack, or for a rank's part of it, is not what it makes for a sequence: its windows,
strides and biases follow the indices of what it is given. So the model computes one whole sequence alone, without
attention, and the mask of every call is kept: the longest so far. Shorter sequences have its first rows and columns,
which is checked whenever a mask of another length is seen; where it does not hold, the model is refused. What a call is
given for a pack is compared every time: masks by value, of attention by hand the operations on logits.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.position_tables import OPEN, IndexSamples, PositionTable, TableComparison, band, equal
from lengthwise.runtime.wrap.recorded_operations import LearnedOperations, Operations

MOST_NUMBERS = 1 << 28
"""Most numbers in a table that is neither causal nor open."""
FINENESS = 1.25
"""A length is known where the mask of one at most this many times shorter was seen."""


ON_PACKS = (
    "this cannot be honoured on packs: set it before prepare and leave it, prepare again where it changes, or compute "
    "sequence by sequence, with packing='never' of prepare"
)
"""What to do about an attention that is another one than when the model was prepared."""
OF_SHARED_PREFIXES = (
    "share_prefixes=True is for causal attention, where no token sees a later one: this model's attention"
)
"""The beginning of errors of models whose attention cannot be that of sequences which share what they begin with."""


@dataclass(kw_only=True)
class _Learned:
    """What was learned of a model that computes in one precision."""

    tables: dict[int, PositionTable] = field(default_factory=dict)
    lengths: set[int] = field(default_factory=set)
    operations: dict[int, LearnedOperations] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    samples: dict[int, IndexSamples] = field(default_factory=dict)


class MaskTables:
    """The masks of a model's attention calls, by their numbers in its forward."""

    def __init__(self, model: str) -> None:
        """``model``: its name, for messages."""
        self._model = model
        self._by_precision: dict[Hashable, _Learned] = {}
        self.use(None)
        self._checked: tuple[Tensor | None, int, PackShard | None, int] = (None, 0, None, -1)

    def __bool__(self) -> bool:
        return any(learned.tables for learned in self._by_precision.values())

    @property
    def num_lengths(self) -> int:
        """How many lengths masks were seen of."""
        return len(self._lengths)

    def use(self, precision: Hashable) -> None:
        """Switch to the tables for a model that computes in ``precision``, on which biases, scales and the numbers that
        hide may depend.
        """
        self._learned = self._by_precision.setdefault(precision, _Learned())
        self._tables, self._lengths = self._learned.tables, self._learned.lengths

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
            positions = torch.arange(short, device=values.device)
            if not equal(old.at(positions, positions), values[:, :short, :short]):
                raise InputError(
                    f"attention call {number} of {self._model} masks the first {short} slots of a sequence otherwise "
                    f"where it has {max(old.length, length)} than where it has {short}, so its mask follows from more "
                    "than positions and cannot be honoured on packs"
                )
        if old is None or length > old.length:
            self._tables[number] = new

    def note_operations(self, number: int, operations: Operations, scale: float | None) -> None:
        """Record what call ``number``, an attention by hand, does to the logits of one whole sequence.

        ``scale``: of the logits, of the first sequence in this precision; others are to have the same.
        """
        learned = self._learned.operations
        if scale is not None:
            self._learned.scales.setdefault(number, scale)
        if number not in learned or operations.num_slots >= learned[number].length:
            learned[number] = LearnedOperations(
                operations, before=learned.get(number - 1), last=learned.get(number), most_numbers=MOST_NUMBERS
            )

    def scale(self, number: int, otherwise: float | None) -> float | None:
        """The scale of the logits of call ``number``, an attention by hand; ``otherwise``: of another precision."""
        return self._learned.scales.get(number, otherwise)

    def other_operations(self, number: int, operations: Operations, shard: PackShard) -> str:
        """What call ``number`` does otherwise to its logits than for a sequence alone; an empty string: nothing."""
        learned = self._learned.operations.get(number)
        return "is by hand, which it was not" if learned is None else learned.difference(operations, shard)

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
        if any(size != 1 for size in leading) and not equal(values, values[(slice(0, 1),) * len(leading)]):
            raise InputError(
                f"attention call {number} of {self._model} has a mask {tuple(mask.shape)} with other values in every "
                "row, which cannot be honoured on packs"
            )
        values = values[(0,) * len(leading)]
        return _relative(values.expand(len(values), length, length))

    def _made(self, number: int, values: Tensor) -> PositionTable:
        length = values.shape[-1]
        seen = values if values.dtype == torch.bool else values == 0
        is_binary = values.dtype == torch.bool or bool((seen | (values <= torch.finfo(values.dtype).min / 2)).all())
        if is_binary:
            before, after = (OPEN if size == length - 1 else size for size in _reach(seen))
            if bool((seen == band(length, before, after, seen.device)).all()):
                return PositionTable(length=length, before=before, after=after)
        other = self._tables.get(number - 1)
        if other is not None and other.values is not None and other.length == length and equal(other.values, values):
            return other  # layers share it
        if values.numel() > MOST_NUMBERS:
            raise InputError(
                f"attention call {number} of {self._model} has a mask of {values.numel():,} numbers for a sequence of "
                f"{length:,} slots (limit {MOST_NUMBERS:,}); set max_length={int((MOST_NUMBERS / len(values)) ** 0.5)}"
            )
        return PositionTable(length=length, values=(seen if is_binary else values).clone())

    def kind(self, number: int, mask: Tensor | None, shard: PackShard) -> dict[str, Any]:
        """The mask of call ``number`` for the sequences of a pack, as options of :class:`AttentionRequest`.

        Raises:
            InputError: what it was given for this rank's slots does not follow from the positions.
        """
        table = self._tables[number]
        if shard.tree is not None and table.values is not None:
            raise InputError(f"{OF_SHARED_PREFIXES} has masks or biases of its own; leave share_prefixes out")
        if mask is not None:
            self._check(number, mask, table, shard)
        if table.values is not None:
            if table.length < shard.longest:
                raise InputError(
                    f"attention call {number} of {self._model} has a mask that is known for {table.length} slots, not "
                    f"for {shard.longest}; compute micro-batches of a prepared run alone"
                )
            return {"causal": False, "mask": partial(_part, table.values)}
        is_open = table.before == OPEN and table.after in (0, OPEN)
        return {"causal": table.after == 0, "window": None if is_open else (table.before, table.after)}

    def check_band(self, number: int, mask: Tensor, shard: PackShard, *, causal: bool) -> None:
        """Raise ``InputError`` unless a mask, of a call that has none for a sequence alone, only parts sequences."""
        self._check(number, mask, PositionTable(length=shard.longest, before=OPEN, after=0 if causal else OPEN), shard)

    def check_left_out(self, number: int, *, causal: bool) -> None:
        """Raise ``InputError`` unless call ``number``, which is given no mask, had one that hides no more."""
        table = self._tables[number]
        hidden = (OPEN, 0) if causal else (OPEN, OPEN)
        if table.values is not None or (table.before, table.after) != hidden:
            raise InputError(
                f"attention call {number} of {self._model} was given no mask and is_causal={causal}, where it was "
                f"given a mask when it was prepared; {ON_PACKS}"
            )

    def _check(self, number: int, mask: Tensor, table: PositionTable, shard: PackShard) -> None:
        """Check that a mask given for a pack follows from indices or from positions."""
        checked, version, of_shard, of_table = self._checked
        if checked is mask and version == mask._version and of_shard is shard and of_table == id(table):
            return
        values = mask.detach()[(None,) * max(0, 3 - mask.dim())].flatten(0, -3)
        t = min([shard.num_slots, *(size for size in mask.shape[-2:] if size > 1)])
        values = values.expand(len(values), t, t)
        samples = self._learned.samples.setdefault(number, IndexSamples())
        if (difference := TableComparison(values, table, shard, is_relative=True).difference(samples)) is not None:
            raise InputError(
                f"attention call {number} of {self._model} was given another mask for a pack than follows from the "
                f"positions in its sequences, {difference}: it depends on tokens, on the length, or on what was "
                f"changed since it was prepared; {ON_PACKS}"
            )
        self._checked = mask, mask._version, shard, id(table)


def _part(values: Tensor, number: int, heads: range, queries: range, keys: range) -> Tensor:
    part = values[:, queries.start : queries.stop, keys.start : keys.stop]
    return part[0] if len(values) == 1 else part[[head % len(values) for head in heads]]


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
