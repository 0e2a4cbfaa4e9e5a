"""A few slots of a sequence of the corpus that follow one another, on which a model is compared before the run."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LONGEST = 7
"""Slots of a window, at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusWindow:
    """Slots of one sequence, with every column that it has."""

    columns: Mapping[str, np.ndarray]
    """``tokens``, and ``labels`` and others by name."""
    place: int
    """The slot for which it was chosen."""

    def cut(self, name: str, num_slots: int) -> np.ndarray:
        """``num_slots`` values of a column, with that slot among them; from the beginning again if it has fewer."""
        values = self.columns[name]
        start = max(0, min(self.place - num_slots // 2, len(values) - num_slots))
        return values[(start + np.arange(num_slots)) % len(values)]
