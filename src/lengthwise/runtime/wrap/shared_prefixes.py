"""Shared prefixes: the sequences of a unit laid out as one, with what they begin with once.

To sampler and planner such a unit is a sequence as long as its prefix tree has slots; a micro-batch computes it as one
too, with attention along the tree (:class:`lengthwise.core.prefix_tree.PrefixTree`). What losses are made of is still
said by sequence. A slot is shared where tokens and all columns for the forward are equal up to it, and no sequence has
a target there: so the loss of a sequence is at slots of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from lengthwise.core.prefix_tree import PrefixTree, prefix_tree
from lengthwise.runtime.wrap.unit_members import Units

Column = Callable[[int], np.ndarray]
"""The values of a sequence by its number, one for each slot."""

_KEPT_TREES = 4096


class SharedPrefixes:
    """Columns of units, or of parts of units, by their slots, made of those of their sequences."""

    def __init__(
        self, tokens: Column, labels: Column, passed: Mapping[str, Column], *, units: Units, ignore_index: int
    ) -> None:
        """The columns are by sequence, and ``units`` have these sequences."""
        self._tokens, self._labels, self._passed = tokens, labels, passed
        self._units, self._ignore_index = units, ignore_index
        self.tree = lru_cache(_KEPT_TREES)(self._tree)
        """The prefix tree of a unit by its number."""

    def ids(self, units: Sequence[int]) -> list[int]:
        """The numbers of the sequences of some units, or parts of units."""
        return [member for unit in units for member in self._units.planned(unit)]

    def tokens(self, unit: int, /) -> np.ndarray:
        """[T] the tokens of the slots of a unit."""
        return self.tree(unit).first([self._tokens(member) for member in self.ids([unit])])

    def passed(self, name: str, unit: int) -> np.ndarray:
        """[T] a column for the forward."""
        return self.tree(unit).first([self._passed[name](member) for member in self.ids([unit])])

    def labels(self, unit: int) -> np.ndarray:
        """[T] each slot's own label; none at the first slot of a segment, which is predicted by no slot before it."""
        tree = self.tree(unit)
        labels = tree.first([self._labels(member) for member in self.ids([unit])])
        labels[list(tree.bounds[:-1])] = self._ignore_index
        return labels

    def _tree(self, unit: int) -> PrefixTree:
        columns, ids = {"": self._tokens, **self._passed}, self.ids([unit])
        rows = [{name: np.asarray(values_of(member)) for name, values_of in columns.items()} for member in ids]
        return tree_of(rows, [self._labels(member) for member in ids], self._ignore_index)


def tree_of(rows: Sequence[Mapping[str, np.ndarray]], labels: Sequence[np.ndarray], ignore_index: int) -> PrefixTree:
    """The prefix tree of sequences with ``rows`` of columns for the forward and with ``labels``, each token's own."""
    return prefix_tree(rows, [np.append(of_row[1:] == ignore_index, False) for of_row in labels])
