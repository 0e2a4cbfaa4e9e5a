"""Read items that ranks bring to a step: like those of the corpus that the run was prepared with."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.brought_items import LABELS, SPECIAL, TOKENS, SequenceColumns
from lengthwise.runtime.loop.prepared_model import CheckIds
from lengthwise.session.dataset_items import DatasetItems
from lengthwise.session.datasets import RunSequences
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns, ItemRow, is_mapping
from lengthwise.session.sequence_units import in_words


class ItemReader:
    """Reads items into the columns that the corpus has, and refuses others."""

    def __init__(self, sequences: RunSequences, expected: ExpectedColumns, check_ids: CheckIds) -> None:
        """``sequences``: the corpus that the run was prepared with."""
        store = sequences.store
        of_items = isinstance(store, DatasetItems)
        self._columns = ItemColumns(store.columns.expected if isinstance(store, DatasetItems) else expected)
        self._used = store.used if isinstance(store, DatasetItems) else frozenset([LABELS] * sequences.has_loss_mask)
        self._has_units, self._check_ids = sequences.units is not None, check_ids
        self._example = "item 0 of the corpus" if of_items else "the index"

    def __call__(self, items: Iterable[Any]) -> list[list[SequenceColumns]]:
        """The sequences of each item: one, or the members of a unit.

        Raises:
            InputError: an item cannot be used, or is not like those of the corpus.
        """
        if is_mapping(items):
            raise InputError(
                f"run.step takes a list of items, and got {type(items).__name__} with the columns "
                f"{', '.join(map(str, items))}; give each item as a dictionary of its own, without padding"
            )
        rows = [self._columns.read(number, item) for number, item in enumerate(items)]
        for number, row in enumerate(rows):
            self._check_alike(number, row)
        if rows and self._columns.expected.slot_tokens == 1:
            self._check_ids(_largest([row.tokens for row in rows]), self._largest_label(rows))
        return [self._sequences(row) for row in rows]

    def _check_alike(self, number: int, row: ItemRow) -> None:
        """Raise ``InputError`` unless an item has the columns of the corpus' items, and is a unit if they are."""
        if row.used != self._used:
            name = min(row.used ^ self._used)
            has, lacks = (f"item {number}", self._example) if name in row.used else (self._example, f"item {number}")
            raise InputError(f"{has} has {name} and {lacks} has none; items of a step are as those of the corpus are")
        if row.is_unit != self._has_units:
            raise InputError(
                f"item {number} is {in_words(row.is_unit)}, and {self._example} is {in_words(self._has_units)}; items "
                "of a step are as those of the corpus are"
            )
        if not row.is_unit and len(row.bounds) > 2:
            raise InputError(f"item {number} is a row of {len(row.bounds) - 1} sequences; give each as an item")

    def _largest_label(self, rows: Sequence[ItemRow]) -> tuple[int, str] | None:
        """The largest label that is predicted, and its item."""
        first = int(self._columns.expected.objective == NEXT_TOKEN)
        return _largest(
            [
                np.concatenate([labels[start + first : end] for start, end in pairwise(row.bounds)])
                for row in rows
                if (labels := row.tokens if row.labels is None else row.labels) is not None
            ]
        )

    def _sequences(self, row: ItemRow) -> list[SequenceColumns]:
        columns = {TOKENS: row.tokens, LABELS: row.labels, SPECIAL: row.special, **row.passed}
        return [
            {name: values[start:end] for name, values in columns.items() if values is not None}
            for start, end in pairwise(row.bounds)
        ]


def _largest(values: Sequence[np.ndarray]) -> tuple[int, str] | None:
    """The largest of the values of items, and the item that has it."""
    highest = [int(array.max()) if len(array) else -1 for array in values]
    number = int(np.argmax(highest))
    return highest[number], f"item {number} of this step"
