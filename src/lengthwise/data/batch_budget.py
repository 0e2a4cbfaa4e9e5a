"""Token budgets: an order of sequences cut into batches that compute no more tokens than they may.

What is computed is counted: the sum of lengths where sequences are packed, rows times the longest where they are
padded. No sequence is lost: one over the budget is a batch alone, the end of an epoch is a smaller batch, and so is one
that a minimum number of sequences cannot be given. A batch takes as many of the sequences that follow as it may; the
minimum then moves sequences from the end of a batch to the next.

Time is O(n log n) at most: a search per sequence for sums, one pass for padded batches.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a batch: tokens and numbers of sequences."""

    tokens: int | None = None
    """Computed tokens; None: any number."""
    padded: bool = False
    """Padding counts: a batch computes rows x its longest sequence, else the sum of its lengths."""
    min_sequences: int = 1
    """Fewer only where budget and order allow no more."""
    max_sequences: int | None = None
    equal_shapes: int | None = None
    """Or: a batch is this many micro-batches of one shape, rows x the longest sequence of all; the other limits are
    those of one micro-batch. Rows of padding alone are at an epoch's end, and beside a sequence over the budget."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "padded" and value is not None and value < 1:
                raise InputError(f"{name} is {value}; at least 1 is needed")
        if self.max_sequences is not None and self.min_sequences > self.max_sequences:
            raise InputError(
                f"min_sequences={self.min_sequences} is more than max_sequences={self.max_sequences}; lower one"
            )
        if self.tokens is None and self.max_sequences is None:
            raise InputError("a budget needs a limit: tokens, max_sequences or both")
        if self.equal_shapes is not None and not self.padded:
            raise InputError("equal_shapes needs padded: packs of one size are padded sequences of one length")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a batch, which all have one shape."""
        return self.equal_shapes or 1

    def cut(self, lengths: np.ndarray, *, breaks: np.ndarray | None = None) -> "BatchBoundaries":
        """Batches of consecutive sequences of ``lengths`` tokens; none crosses a position of ``breaks``."""
        lengths = np.asarray(lengths, dtype=np.int64)
        edges = np.unique([0, *(() if breaks is None else breaks), len(lengths)]).astype(np.int64)
        walk = self._walk_padded if self.padded else self._walk_packed
        ends = np.array([end for segment in walk(lengths, edges.tolist()) for end in segment], dtype=np.int64)
        if self.min_sequences > 1:
            ends = self._fill(lengths, ends, set(edges.tolist()))
        return BatchBoundaries(ends=ends, lengths=lengths, budget=self)

    def _walk_packed(self, lengths: np.ndarray, edges: list[int]) -> Iterator[list[int]]:
        before = np.concatenate([[0], np.cumsum(lengths)])
        furthest = np.arange(1, len(lengths) + 1)
        if self.tokens is not None:
            limits = before[:-1] + min(self.tokens, int(before[-1]))
            furthest = np.maximum(np.searchsorted(before, limits, side="right") - 1, furthest)
        else:
            furthest[:] = len(lengths)
        if self.max_sequences is not None:
            furthest = np.minimum(furthest, np.arange(len(lengths)) + self.max_sequences)
        end_of = furthest.tolist()
        for start, stop in pairwise(edges):
            ends = []
            while start < stop:
                start = min(end_of[start], stop)
                ends.append(start)
            yield ends

    def _walk_padded(self, lengths: np.ndarray, edges: list[int]) -> Iterator[list[int]]:
        length_of, parts = lengths.tolist(), self.micro_batches
        limit = int(lengths.sum()) * (len(lengths) + 1) if self.tokens is None else self.tokens
        max_sequences = parts * (len(lengths) if self.max_sequences is None else self.max_sequences)
        for start, stop in pairwise(edges):
            ends, position, count, longest = [], start, 0, 0
            while position < stop:
                length = length_of[position]
                taller = length if length > longest else longest
                if count == 0 or (count < max_sequences and (count // parts + 1) * taller <= limit):
                    position, count, longest = position + 1, count + 1, taller
                    continue
                position -= count % parts if count > parts else 0  # whole rows: the rest begins the next batch
                ends.append(position)
                count, longest = 0, 0
            ends.append(stop)
            yield ends

    def _fill(self, lengths: np.ndarray, ends: np.ndarray, edges: set[int]) -> np.ndarray:
        """Move sequences from a batch to the next, if that is too small and both are large enough then."""
        least, bounds = self.min_sequences * self.micro_batches, [0, *ends.tolist()]
        for number in (1 + np.flatnonzero(np.diff(ends, prepend=0) < least)).tolist():
            before, start, end = bounds[max(0, number - 2)], bounds[number - 1], bounds[number]
            earlier = end - least
            if start in edges or earlier - before < least:
                continue
            if self.tokens is None or self._computed(lengths[earlier:end]) <= self.tokens:
                bounds[number - 1] = earlier
        return np.array(bounds[1:], dtype=np.int64)

    def _computed(self, lengths: np.ndarray) -> int:
        """Tokens of a micro-batch of a batch of these."""
        rows = -(-len(lengths) // self.micro_batches)
        return rows * int(lengths.max()) if self.padded else int(lengths.sum())

    def to_json(self) -> dict[str, Any]:
        """Plain values of the budget, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchBoundaries:
    """Where the batches of an order end, and what they compute."""

    ends: np.ndarray
    """[num_batches] ascending positions; batch i is from ``ends[i - 1]`` to before ``ends[i]``."""
    lengths: np.ndarray
    """[num_sequences] in the order that was cut."""
    budget: Budget

    @property
    def starts(self) -> np.ndarray:
        """First position of each batch, [num_batches]."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def num_sequences(self) -> np.ndarray:
        """Number of sequences of each batch, [num_batches]."""
        return np.diff(self.ends, prepend=0)

    @property
    def rows(self) -> np.ndarray:
        """Rows of every micro-batch of each batch, [num_batches]: as many as its sequences, dealt evenly, need."""
        return -(-self.num_sequences // self.budget.micro_batches)

    @property
    def longest(self) -> np.ndarray:
        """Tokens of the longest sequence of each batch, [num_batches]."""
        return np.maximum.reduceat(self.lengths, self.starts)

    @property
    def num_computed(self) -> np.ndarray:
        """[num_batches] tokens each computes, padding included."""
        if self.budget.padded:
            return self.budget.micro_batches * self.rows * self.longest
        return np.add.reduceat(self.lengths, self.starts)

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1.0 - int(self.lengths.sum()) / int(self.num_computed.sum())

    @property
    def num_over(self) -> int:
        """Batches over the budget: each one sequence that is."""
        limit = self.budget.tokens
        return 0 if limit is None else int((self.num_computed > limit * self.budget.micro_batches).sum())

    @property
    def num_small(self) -> int:
        """Batches of fewer sequences than the minimum: what could be given to none, and is computed all the same."""
        return int((self.num_sequences < self.budget.min_sequences * self.budget.micro_batches).sum())
