"""Whole items of a corpus as the sequences that a model is compared on, where it is compared at their lengths alone.

A forward may look up what belongs to an item by its number, or read coordinates that end with it. Of an item that is
repeated or cut to another length neither is right.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.runtime.wrap.collator import PackCollator


class WholeItems:
    """A source whose sequences 0, 1, ... are sequences of the corpus of certain lengths, with all of their columns."""

    def __init__(self, collator: PackCollator, numbers: tuple[int, ...]) -> None:
        """``numbers``: which sequence of the corpus each is."""
        self._collator, self._numbers = collator, numbers

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence."""
        return np.asarray(self._collator.source.tokens(self._numbers[sequence]))

    def changes(self) -> dict[str, Any]:
        """The fields of the collator that are other ones while it has these sequences."""
        before, labels = self._collator, self._collator.labels
        return {
            "source": self,
            "labels": labels and (self.tokens if before.objective == NEXT_TOKEN else self._with_loss(labels)),
            "passed": {name: self._column(values_of) for name, values_of in before.passed.items()},
            "loss_columns": {name: self._column(values_of) for name, values_of in before.loss_columns.items()},
            "item_numbers": np.array(before.items(self._numbers)),
        }

    def _column(self, values_of: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
        return lambda sequence: np.asarray(values_of(self._numbers[sequence]))

    def _with_loss(self, labels_of: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
        """Labels with a loss for every token."""
        return lambda sequence: np.maximum(labels_of(self._numbers[sequence]), 0)


def whole_items(collator: PackCollator, lengths: tuple[int, ...]) -> WholeItems | None:
    """Sequences of the corpus of ``lengths`` in slots, others for each as far as there are; None: there are none."""
    if collator.slots_of_corpus is None:
        return None
    places, numbers, times = {}, list[int](), Counter[int]()
    for length in lengths:
        if length not in places:
            places[length] = np.flatnonzero(collator.slots_of_corpus == length)
        if not len(places[length]):
            return None
        numbers.append(int(places[length][times[length] % len(places[length])]))
        times[length] += 1
    return WholeItems(collator, tuple(numbers))
