"""Whether a collate function makes of items together what it makes of each alone, up to padding and order."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.session.item_values import as_array

_WITHOUT_PADDING = ("input_ids", "labels")
"""Columns that have one value where there is no token."""


def mixed_column(collate: Callable[[list[Any]], Any], items: list[Any]) -> str:
    """The column that depends on what an item is collated with; an empty string: none that can be compared.

    Batches of other forms are not looked at: laid end to end, or of items that cannot be collated together.
    """
    try:
        batch = collate([copy.copy(item) for item in items])
    except Exception:
        return ""
    if (
        not isinstance(batch, Mapping)
        or np.ndim(batch.get("input_ids", 0)) != 2
        or len(batch["input_ids"]) != len(items)
    ):
        return ""
    alone = [collate([copy.copy(item)]) for item in items]
    places = _places(batch["input_ids"], [row["input_ids"] for row in alone])
    if places is None:
        return "input_ids"
    for name, values in batch.items():
        if not _is_made_of(name, values, [row.get(name) for row in alone], places):
            return str(name)
    return ""


def _places(batch: Any, rows: list[Any]) -> list[int] | None:
    """The row of a batch that each item has become; None: one has become no row, or another."""
    values, left, places = as_array("input_ids", batch), list(range(len(rows))), list[int]()
    for number, row in enumerate(rows):
        nearest_first = sorted(left, key=lambda place: place != number)
        ids = as_array("input_ids", row)[0]
        place = next((place for place in nearest_first if _is_padded(values[place], ids)), None)
        if place is None:
            return None
        left.remove(place)
        places.append(place)
    return places


def _is_made_of(name: str, batch: Any, rows: list[Any], places: list[int]) -> bool:
    """Whether a column of a batch has the ``rows`` of single items in these ``places``; True for other forms."""
    try:
        values, alone = as_array(name, batch), [as_array(name, row) for row in rows if row is not None]
    except InputError:
        return True  # no numbers
    if values.ndim not in (1, 2) or len(values) != len(rows):
        return True
    if len(alone) < len(rows) or any(row.ndim != values.ndim or len(row) != 1 for row in alone):
        return False
    return all(
        _is_padded(values[place], row[0], may_go_on=name not in _WITHOUT_PADDING) for place, row in zip(places, alone)
    )


def _is_padded(values: np.ndarray, row: np.ndarray, *, may_go_on: bool = False) -> bool:
    """Whether ``values`` are ``row`` with padding before or behind it: of one value, unless it ``may_go_on``."""
    num_padded = np.size(values) - np.size(row)
    if num_padded < 0 or not np.ndim(row):
        return bool(np.all(values == row)) and not num_padded
    splits = ((values[: len(row)], values[len(row) :]), (values[num_padded:], values[:num_padded]))
    return any(np.array_equal(part, row) and (may_go_on or len(np.unique(rest)) < 2) for part, rest in splits)
