"""Rows that tasks read and write, and which task is the first to write a row.

The first result of a row is written and later ones are added, so buffers start empty: zeros that every result is added
to would cost a pass more to fill and another to read. Of a ring's hops the first writes all queries, and most hops have
one result for each key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lengthwise.runtime.models.host_copies import to_device

Runs = Sequence[tuple[int, int]]
"""Runs of neighbouring rows: the first of each, and the one after its last."""

_MAX_FILLS = 4
"""Runs of rows that are filled one by one; of more, the whole buffer is, at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some rows of a tensor."""

    runs: Runs
    index: slice | Tensor
    """A slice where they are neighbours."""

    @classmethod
    def of(cls, runs: Runs, device: torch.device) -> "Rows":
        """Rows of ``runs``, in their order."""
        if all(end == start for (_, end), (start, _) in pairwise(runs)):
            return cls(runs=runs, index=slice(runs[0][0], runs[-1][1]))
        numbers = np.concatenate([np.arange(start, end) for start, end in runs])
        return cls(runs=runs, index=to_device(numbers, device))

    def are_all(self, num_rows: int) -> bool:
        """Whether they are all of ``num_rows`` rows, each where it lies."""
        return isinstance(self.index, slice) and self.index == slice(0, num_rows)

    def read(self, x: Tensor) -> Tensor:
        """These rows of ``x``: a view where they are neighbours, else a copy."""
        return x[self.index]

    def write(self, x: Tensor, values: Tensor) -> None:
        """Write ``values`` to these rows of ``x``, in the dtype of ``x``; each is there once."""
        if isinstance(self.index, slice):
            x[self.index].copy_(values)
        else:
            x.index_copy_(0, self.index, values.to(x.dtype))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add ``values`` to these rows of ``x``."""
        if isinstance(self.index, slice):
            x[self.index].add_(values)
        else:
            x.index_add_(0, self.index, values.to(x.dtype))


@dataclass(frozen=True, kw_only=True)
class FirstWrites:
    """Which of some results, one after another, are the first of all their rows and have each once."""

    is_first: tuple[bool, ...]
    blank: tuple[slice, ...]
    """Rows to fill beforehand: no result has them, or their first one has other rows that were written before."""

    @classmethod
    def of(cls, results: Sequence[Runs], num_rows: int) -> "FirstWrites":
        """Find them among ``results``, each given by its rows, in a buffer of ``num_rows``."""
        is_written, is_blank = np.zeros(num_rows, dtype=bool), np.zeros(num_rows, dtype=bool)
        is_first = []
        for runs in results:
            overlap = any(end > start for (_, end), (start, _) in pairwise(sorted(runs)))
            is_first.append(not overlap and not any(is_written[start:end].any() for start, end in runs))
            for start, end in runs:
                if not is_first[-1]:
                    is_blank[start:end] |= ~is_written[start:end]
                is_written[start:end] = True
        edges = np.flatnonzero(np.diff(is_blank | ~is_written, prepend=False, append=False)).reshape(-1, 2)
        blank = edges.tolist() if len(edges) <= _MAX_FILLS else [(0, num_rows)]
        return cls(is_first=tuple(is_first), blank=tuple(slice(start, end) for start, end in blank))

    def fill(self, x: Tensor, value: float) -> Tensor:
        """``x`` with ``value`` in the rows to fill; in place."""
        for rows in self.blank:
            x[rows].fill_(value)
        return x
