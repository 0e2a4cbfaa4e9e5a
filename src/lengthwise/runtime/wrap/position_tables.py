"""Tensors over pairs of slots as tables over positions in a sequence, and the comparison of a pack's tensors with them.

What a model makes for a pack follows either from the indices of its slots or from their positions. Rows of queries are
compared some at a time, so that no further tensor of all pairs is made; the first pair that differs is found.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lengthwise.runtime.wrap.context import PackShard

OPEN = 1 << 62
"""The size of a window side that is open."""
COMPARED_AT_ONCE = 1 << 20
"""Numbers of a tensor that are compared at once."""


class OtherPair(NamedTuple):
    """The first pair of slots at which a tensor is another than its table."""

    query: int
    """The position in its sequence of the query."""
    key: int
    value: float | bool
    expected: float | bool

    def __str__(self) -> str:
        """Tell both values and where they are."""
        values: list[Any] = [self.value, self.expected]
        if isinstance(self.value, bool) is not isinstance(self.expected, bool):  # as what is added to logits
            values = [(0.0 if x else -math.inf) if isinstance(x, bool) else x for x in values]
        value, expected = (x if isinstance(x, bool) else f"{x:.6g}" for x in values)
        return f"{value} where it was {expected}, for a query at position {self.query} and a key at position {self.key}"


@dataclass(frozen=True, kw_only=True)
class PositionTable:
    """A tensor [1 or heads, queries, keys] of the longest sequence seen so far."""

    length: int
    before: int = 0
    after: int = 0
    """How many slots before and after its own each slot sees, where there are no ``values``."""
    inside: bool | float = True
    """The value of what a slot sees."""
    outside: bool | float = False
    values: Tensor | None = field(default=None, repr=False)
    """[1 or heads, 1 or length, 1 or length]: booleans, or numbers."""

    def at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[1 or heads, queries, keys] the values at positions; of size 1 along an axis where all are alike."""
        if self.values is not None:
            rows = self.values if self.values.shape[1] == 1 else self.values[:, queries]
            return rows if rows.shape[2] == 1 else rows[:, :, keys]
        seen = torch.ones(1, 1, dtype=torch.bool, device=keys.device)
        if self.after != OPEN:
            seen = keys <= queries[:, None] + self.after
        if self.before != OPEN:
            seen = seen & (keys >= queries[:, None] - self.before)
        if self.inside is True and self.outside is False:
            return seen[None]
        inside, outside = (torch.tensor(value).to(keys.device) for value in (self.inside, self.outside))
        return torch.where(seen, inside, outside)[None]

    def diagonal(self, positions: Tensor) -> Tensor | float | bool:
        """[1 or heads, positions, 1] the values of positions with themselves."""
        if self.values is None:
            return self.inside
        rows, keys = (0 if size == 1 else positions for size in self.values.shape[1:])
        return self.values[:, rows, keys].reshape(len(self.values), -1, 1)

    @cached_property
    def by_distance(self) -> Tensor | None:
        """[1 or heads, 2 length - 1] the values by the distance of the key behind the query, if they follow from it."""
        values, length = self.values, self.length
        if values is None or values.shape[1:] != (length, length):
            return None
        if not bool((values[:, 1:, 1:] == values[:, :-1, :-1]).all()):
            return None
        return torch.cat([values[:, 1:, 0].flip(1), values[:, 0]], dim=1)


def band(length: int, before: int, after: int, device: torch.device) -> Tensor:
    """The mask of a causal or windowed attention, [1, length, length]."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return ((distance <= before) & (distance >= -after))[None]


def equal(first: Tensor, second: Tensor) -> bool:
    """Whether two masks are equal; any large negative number hides."""
    if first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second):
        return True
    return bool(near(first, second).all())


def near(first: Tensor, second: Tensor) -> Tensor:
    """Where two masks are equal, in the lower of their precisions; any large negative number hides."""
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first == second
    if not (first.is_floating_point() or second.is_floating_point()):
        return first == second
    floats = [x.dtype for x in (first, second) if x.is_floating_point()]
    dtype = min(floats, key=lambda dtype: -torch.finfo(dtype).eps)
    first, second = (_added(x, dtype) if x.dtype == torch.bool else x.to(dtype) for x in (first, second))
    limit = torch.finfo(dtype).min / 2
    return (first == second) | ((first <= limit) & (second <= limit))


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


class TableComparison:
    """The comparison of a tensor [1 or heads, queries, keys], made for a rank's slots of a pack, with a table."""

    def __init__(self, values: Tensor, table: PositionTable, shard: PackShard, *, is_relative: bool = False) -> None:
        """``is_relative``: attention weights depend on differences within a row alone, as on those of a bias."""
        size = max(values.shape[1:])
        forms = [] if table.values is None else [tuple(n == 1 for n in x.shape[1:]) for x in (values, table.values)]
        if is_relative or not forms or forms[0] != forms[1]:
            values = values.expand(len(values), size, size)
        self._values, self._table, self._shard, self._size = values, table, shard, size
        self._shift: Tensor | None = None
        self._is_relative = is_relative and values.is_floating_point()

    def difference(self, beyond: "IndexSamples") -> OtherPair | None:
        """The first pair at which the tensor follows neither from indices nor from positions."""
        if self._follows_from_indices(beyond):
            return None
        first = self._first_difference()
        # Transformers takes a jump of positions, as in a ring's part of a sequence, for the beginning of another one.
        is_parted = first is not None and self._first_difference(_runs(self._shard)[: self._size]) is None
        return None if is_parted else first

    def _follows_from_indices(self, beyond: "IndexSamples") -> bool:
        """Whether it is the table by index, as far as slots of one sequence may be from each other."""
        table = self._table
        if table.values is None or table.by_distance is not None:
            return self._follows_from_distances()
        num_known = min(self._size, table.length)
        self._set_shift(num_known)
        keys = torch.arange(min(num_known, self._values.shape[2]), device=self._values.device)
        for rows in self._rows(min(num_known, self._values.shape[1]), num_known):
            queries = torch.arange(rows.start, rows.stop, device=keys.device)
            if not equal(self._block(rows)[:, :, :num_known], self._expected(queries, keys)):
                return False
        return num_known == self._size or beyond.are_equal(self._values)

    def _follows_from_distances(self) -> bool:
        """Whether it is the table by the distance of a key from its query."""
        table, length, size, device = self._table, self._table.length, self._size, self._values.device
        self._set_shift(size)
        for rows in self._rows(size, min(size, 3 * length), max(64, length)):
            keys = torch.arange(max(0, rows.start - length + 1), min(size, rows.stop + length - 1), device=device)
            queries = torch.arange(rows.start, rows.stop, device=device)
            block = self._block(rows)[:, :, int(keys[0]) : int(keys[-1]) + 1]
            if table.by_distance is None:
                expected = self._expected(queries, keys)
            else:
                distance = (keys - queries[:, None]).clamp(1 - length, length - 1)
                expected = table.by_distance[:, distance + length - 1]
                expected = expected if self._shift is None else expected - table.by_distance[:, length - 1, None, None]
            if equal(block, expected.expand(len(block), -1, -1)):
                continue
            if size <= length:
                return False
            is_far = (keys <= queries[:, None] - length) | (keys >= queries[:, None] + length)
            if not bool((near(block, expected) | is_far).all()):
                return False
        return True

    def _first_difference(self, runs: Tensor | None = None) -> OtherPair | None:
        """The first pair of slots of one sequence at which it is not the table by position.

        ``runs``: [t] numbers, and slots of different ones are to be hidden from each other.
        """
        self._set_shift(self._size)
        shard, values = self._shard, self._values
        positions, numbers = shard.positions[: self._size], _numbers(shard)[: self._size]
        is_real = numbers < len(shard.ids) if shard.ids else torch.ones_like(numbers, dtype=torch.bool)
        has_rows, has_keys = (size > 1 or self._size == 1 for size in values.shape[1:])
        keys = positions if has_keys else positions[:1]
        if self._table.values is not None:
            is_real = is_real & (positions < self._table.length)
            positions, keys = (x.clamp(max=self._table.length - 1) for x in (positions, keys))
        for rows in self._rows(values.shape[1], values.shape[2]):
            queries = positions[rows.start : rows.stop]
            block = self._block(rows)
            expected = self._expected(queries, keys).expand(-1, *block.shape[1:])
            counts = is_real[rows.start : rows.stop, None] if has_rows else is_real[None]
            if has_rows and has_keys:
                if runs is not None:
                    expected = _parted(expected, runs[rows.start : rows.stop, None] == runs)
                counts = counts & (numbers[rows.start : rows.stop, None] == numbers)
            differs = ~near(block, expected) & counts
            if bool(differs.any()):
                head, row, key = differs.nonzero()[0].tolist()
                value, other = block[head, row, key].item(), expected[head % len(expected), row, key].item()
                query = int(queries[row] if has_rows else keys[key])
                return OtherPair(query, int(keys[key]) if has_keys else query, value, other)
        return None

    def _rows(self, num_rows: int, num_keys: int, most: int = COMPARED_AT_ONCE) -> Iterator[range]:
        """Rows that are compared at once, against ``num_keys`` each; ``most``: of them."""
        chunk = min(most, max(1, COMPARED_AT_ONCE // max(1, len(self._values) * num_keys)))
        for start in range(0, num_rows, chunk):
            yield range(start, min(num_rows, start + chunk))

    def _set_shift(self, size: int) -> None:
        """Take biases relative to that of each slot with itself, if each of the first ``size`` sees itself."""
        if not self._is_relative:
            return
        diagonal = self._values.diagonal(dim1=-2, dim2=-1)
        is_seen = bool((diagonal[:, :size] > torch.finfo(diagonal.dtype).min / 2).all())
        self._shift = diagonal[..., None] if is_seen else None

    def _block(self, rows: range) -> Tensor:
        block = self._values[:, rows.start : rows.stop]
        return block if self._shift is None else block - self._shift[:, rows.start : rows.stop]

    def _expected(self, queries: Tensor, keys: Tensor) -> Tensor:
        expected = self._table.at(queries, keys)
        is_shifted = self._shift is not None and expected.is_floating_point()
        return expected - self._table.diagonal(queries) if is_shifted else expected


class IndexSamples:
    """Rows and columns of a tensor that follows from indices alone, where its table has no entries for them.

    The first of a size is taken as it is; others have to agree with it, so that one that follows from tokens is found.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._columns: dict[int, Tensor] = {}

    def are_equal(self, values: Tensor) -> bool:
        """Whether [1 or heads, queries, keys] are those of before; longer ones are kept."""
        numbers = {n for power in range(max(values.shape).bit_length()) for n in (1 << power, 3 << power)}
        for axis, lines in ((1, self._rows), (2, self._columns)):
            for number in sorted({0, *numbers}):
                if number >= values.shape[axis]:
                    break
                line, before = values.select(axis, number), lines.get(number)
                size = 0 if before is None else min(line.shape[1], before.shape[1])
                if before is not None and not equal(line[:, :size], before[:, :size]):
                    return False
                if before is None or line.shape[1] > before.shape[1]:
                    lines[number] = line.clone()
        return True


def _parted(expected: Tensor, is_together: Tensor) -> Tensor:
    """A mask where pairs that are not together are hidden: of booleans, or of what is added to logits."""
    if expected.dtype == torch.bool:
        return expected & is_together
    return expected.masked_fill(~is_together, -torch.inf) if expected.is_floating_point() else expected


def _runs(shard: PackShard) -> Tensor:
    """[t] numbers that differ where positions do not follow one another."""
    return (torch.diff(shard.positions, prepend=shard.positions[:1] - 1) != 1).cumsum(0)


def _numbers(shard: PackShard) -> Tensor:
    """[t] the number in the pack of the sequence, or padding, that each slot of this rank is in."""
    ends = torch.tensor(shard.cu_seqlens[1:])
    return torch.bucketize(torch.from_numpy(shard.places), ends, right=True).to(shard.device)
