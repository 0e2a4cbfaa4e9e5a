"""Columns beside ready tokens that are not read: harmless ones are named, those that mean something are refused."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from lengthwise.core.atomic_write import shell_word
from lengthwise.core.column_rules import reason_refused, says_loss
from lengthwise.core.errors import InputError
from lengthwise.index.readers.token_columns import ColumnsOfFirstRow


def unused_columns(
    values: Mapping[str, Any], first_row: ColumnsOfFirstRow, *, field: str, place: Callable[[], str]
) -> tuple[str, ...]:
    """Names of the columns of a row of JSON that are not read; those that are null it does not have.

    Raises:
        InputError: one of them may say what is learned, and it is not known how.
    """
    unused = [name for name, value in values.items() if value is not None and not first_row.reads(name, field, value)]
    for name in (name for name in unused if name not in first_row.ignored):
        leaf = _first_number(values[name])
        if isinstance(leaf, bool | int | float):
            check_harmless(name, values[name], first_row, place)
    return tuple(unused)


def check_harmless(name: str, value: Any, first_row: ColumnsOfFirstRow, place: Callable[[], str]) -> None:
    """Raise ``InputError`` if what a row has in a column that is not read would change what is learned."""
    array = _as_array(value)
    is_loss = says_loss(name, array)
    if (first_row.ignores_loss and is_loss) or not (reason := reason_refused(name, array)):
        return
    masks = ", call a mask of 0 and 1 loss_mask, or ignore all labels and masks with --loss all" if is_loss else ""
    raise InputError(f"{place()}: column {name!r} {reason}; leave it out with --ignore {shell_word(name)}{masks}")


def sample_of_type(type: Any) -> np.ndarray | None:
    """An array of one 1 as a row of an Arrow column of numbers has it; None: the column holds something else."""
    import pyarrow as pa

    depth, type = 0, getattr(type, "storage_type", type)
    while hasattr(type, "value_type"):  # lists, and what is encoded by a dictionary
        depth, type = depth + (not pa.types.is_dictionary(type)), type.value_type
    if pa.types.is_integer(type) or pa.types.is_boolean(type):
        return np.ones((1,) * depth, dtype=np.int64)
    if pa.types.is_floating(type) or pa.types.is_decimal(type):
        return np.ones((1,) * depth, dtype=np.float64)
    return None


def _first_number(value: Any) -> Any:
    """The first value in nested lists that is no null; None: there is none."""
    if not isinstance(value, list):
        return value
    return next((leaf for item in value if (leaf := _first_number(item)) is not None), None)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, OverflowError):  # lists of several lengths, or numbers beyond 64 bits
        return np.empty((len(value), 0) if any(isinstance(item, list) for item in value) else len(value), dtype=object)


def first_given(column: Iterable[Any]) -> int | None:
    """The first row of an Arrow column that has a number in it; None: no row has."""
    return next((row for row, value in enumerate(column) if _first_number(value.as_py()) is not None), None)
