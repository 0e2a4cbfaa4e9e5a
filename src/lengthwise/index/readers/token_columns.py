"""What columns beside ready tokens say: which tokens have a loss, which are padding, where packed sequences begin.

Labels and masks are combined as ``lengthwise.prepare`` combines them, and rows that were padded or packed before become
the sequences they hold.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lengthwise.core.column_names import IGNORED, LABELS, LOSS_MASKS, PADDING, POSITIONS, PROMPT_MASK
from lengthwise.core.errors import InputError
from lengthwise.index.packed_rows import sequence_bounds
from lengthwise.index.readers.document import TokenRows, row_of, where
from lengthwise.index.source_file import WorkUnit

LOSS_COLUMNS = (*LABELS, *LOSS_MASKS, PROMPT_MASK)
_LABEL_RULE = f"a label is the token's own id, or {IGNORED} where it has no loss"
_MASK_RULE = "a mask has 1 for tokens with a loss and 0 for others"
_ANOTHER_LOSS = "Mend it, ignore such columns with --loss all, or train on the rows themselves with lengthwise.prepare"


@dataclass(frozen=True, kw_only=True)
class ColumnsOfFirstRow:
    """The columns beside the tokens of a corpus' first row; what it says of the loss, every row has to say."""

    loss: tuple[str, ...] = ()
    """Its labels and masks; empty: all of its tokens have a loss, and so have those of other rows."""
    others: tuple[str, ...] = ()
    """Its columns of padding and of positions."""
    place: str = "the first row"
    """Where it is, in words."""
    ignores_loss: bool = False
    """Whether labels and masks are not read."""
    ignored: tuple[str, ...] = ()
    """Columns that are as if they were not there."""

    def names_read(self, field: str) -> tuple[str, ...]:
        """All columns that are read beside the tokens, in ``field``, where a row has them."""
        names = (*(() if self.ignores_loss else LOSS_COLUMNS), PADDING, *POSITIONS)
        return tuple(name for name in names if name != field and name not in self.ignored)

    def reads(self, name: str, field: str, value: Any) -> bool:
        """Whether a row's column is read; one label that is no list is the class of the whole row, and not used."""
        is_class = name in LABELS[1:] and not isinstance(value, list)
        return name == field or (name in self.names_read(field) and not is_class)


NO_COLUMNS = ColumnsOfFirstRow()


class Column(NamedTuple):
    """A column of consecutive rows: their values end to end, and the number of values of each."""

    values: np.ndarray
    counts: np.ndarray
    is_given: np.ndarray
    """Of each row, whether it has the column: one that is null says nothing."""


def with_columns(
    unit: WorkUnit, rows: TokenRows, columns: dict[str, Column], first_row: ColumnsOfFirstRow
) -> TokenRows:
    """The sequences that ``rows`` hold once padding is cut off and packed rows are split, and which tokens have a loss.

    Raises:
        InputError: a row contradicts itself, or says of the loss what the first row does not.
    """
    if not columns and not first_row.loss:
        return rows
    keep = _kept(unit, rows, columns)
    return _split(unit, _unpadded(unit, _with_loss(unit, rows, columns, first_row, keep), keep), columns)


def _with_loss(
    unit: WorkUnit, rows: TokenRows, columns: dict[str, Column], first_row: ColumnsOfFirstRow, keep: np.ndarray
) -> TokenRows:
    mask = np.ones(len(rows.flat), dtype=bool)
    says_loss, has_labels = np.zeros((2, len(rows.lengths)), dtype=bool)
    for name in (name for name in LOSS_COLUMNS if name in columns):
        column = columns[name]
        is_read = column.is_given & ~has_labels if name in LABELS else column.is_given
        tokens = np.repeat(is_read, rows.lengths)
        column = _per_token(unit, rows, name, column, is_read)
        has_loss = _loss_of(unit, rows, name, column, tokens)
        if name == PROMPT_MASK:
            is_prompt = np.zeros(len(rows.flat), dtype=bool)
            is_prompt[tokens] = ~has_loss
            _check_begins(unit, rows, is_prompt & keep, keep)
            has_loss &= (keep | np.repeat(says_loss, rows.lengths))[tokens]  # padding is neither prompt nor learned
        mask[tokens] &= has_loss
        says_loss |= is_read
        has_labels |= is_read if name in LABELS else False
    _check_like_first(unit, rows, columns, first_row, says_loss)
    return rows._replace(loss_mask=mask) if first_row.loss else rows


def _per_token(unit: WorkUnit, rows: TokenRows, name: str, column: Column, is_read: np.ndarray) -> Column:
    """The column of the rows that are read, which have a value for each token."""
    if (is_wrong := is_read & (column.counts != rows.lengths)).any():
        row = int(np.argmax(is_wrong))
        place, num_tokens, num_values = where(unit, rows.first_row + row), rows.lengths[row], column.counts[row]
        raise InputError(
            f"{place} has {num_tokens:,} tokens and {num_values:,} values in {name!r}; give one for each token"
            + (", or ignore such columns with --loss all" if name in LOSS_COLUMNS else ", or leave the column out")
        )
    if is_read.all():
        return column
    return Column(column.values[np.repeat(is_read, column.counts)], column.counts[is_read], is_read[is_read])


def _loss_of(unit: WorkUnit, rows: TokenRows, name: str, column: Column, tokens: np.ndarray) -> np.ndarray:
    """Which of the ``tokens`` have a loss as the column says."""
    values, flat = column.values, rows.flat[tokens]
    if name in LABELS:
        mask, rule = values != IGNORED, _LABEL_RULE
        is_wrong = mask & (values != flat)
    else:
        mask, rule = values == 1, _MASK_RULE
        is_wrong = ~mask & (values != 0)
    if is_wrong.any():
        place, value = int(np.argmax(is_wrong)), values[int(np.argmax(is_wrong))].item()
        row = rows.first_row + row_of(rows.lengths, int(np.flatnonzero(tokens)[place]))
        raise InputError(
            f"{where(unit, row)}: {name!r} has {value} for token {int(flat[place])}; {rule}. {_ANOTHER_LOSS}"
        )
    return ~mask if name == PROMPT_MASK else mask


def _check_begins(unit: WorkUnit, rows: TokenRows, is_prompt: np.ndarray, keep: np.ndarray) -> None:
    """Raise ``InputError`` for a row whose prompt does not begin it, once its padding is cut off."""
    if (is_late := _begins_stretch(is_prompt, rows.lengths) & ~_begins_stretch(keep, rows.lengths)).any():
        row = rows.first_row + row_of(rows.lengths, int(np.argmax(is_late)))
        raise InputError(
            f"{where(unit, row)}: {PROMPT_MASK!r} is to be 1 for the tokens of a prompt, which begins the row, and it "
            "is not; give a loss_mask instead, 1 for each token that has a loss"
        )


def _begins_stretch(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Where stretches of true values begin in each row."""
    begins_row = np.zeros(len(values) + 1, dtype=bool)
    begins_row[np.cumsum(lengths) - lengths] = True
    return values & (begins_row[:-1] | ~np.concatenate([[False], values[:-1]]))


def _check_like_first(
    unit: WorkUnit, rows: TokenRows, columns: dict[str, Column], first_row: ColumnsOfFirstRow, says_loss: np.ndarray
) -> None:
    is_other = (says_loss != bool(first_row.loss)) & (rows.lengths > 0)
    if first_row.ignores_loss or not is_other.any():
        return
    row = int(np.argmax(is_other))
    names = [name for name in LOSS_COLUMNS if name in columns and columns[name].is_given[row]]
    here, there = _quoted(names), _quoted(first_row.loss)
    raise InputError(
        f"{where(unit, rows.first_row + row)} has {here}, and {first_row.place} has {there}; give every row labels or "
        "a mask (1 for each token, if all have a loss), or ignore them with --loss all"
    )


def _quoted(names: tuple[str, ...] | list[str]) -> str:
    return " and ".join(map(repr, names)) or "no labels and no mask"


def _kept(unit: WorkUnit, rows: TokenRows, columns: dict[str, Column]) -> np.ndarray:
    """Which tokens are no padding: in each row all, or one stretch of them."""
    keep = np.ones(len(rows.flat), dtype=bool)
    if PADDING not in columns:
        return keep
    column = columns[PADDING]
    values = _per_token(unit, rows, PADDING, column, column.is_given).values
    if (values == 1).all():
        return keep
    tokens = np.repeat(column.is_given, rows.lengths)
    if (is_wrong := (values != 0) & (values != 1)).any():
        row = rows.first_row + row_of(rows.lengths, int(np.flatnonzero(tokens)[int(np.argmax(is_wrong))]))
        raise InputError(
            f"{where(unit, row)}: {PADDING!r} has "
            f"{values[int(np.argmax(is_wrong))].item()}; it is to be 0 for padding and 1 for other tokens: mend it or "
            "leave the column out"
        )
    keep[tokens] = values == 1
    if (is_broken := _sums(_begins_stretch(keep, rows.lengths), rows.lengths) > 1).any():
        place = where(unit, rows.first_row + int(np.argmax(is_broken)))
        raise InputError(
            f"{place}: {PADDING!r} hides a token between others; only padding at the ends is cut off: leave such "
            f"tokens out, or give them the label {IGNORED} instead"
        )
    return keep


def _unpadded(unit: WorkUnit, rows: TokenRows, keep: np.ndarray) -> TokenRows:
    """The rows without the padding at their ends; one of padding alone has no token."""
    if keep.all():
        return rows
    if rows.loss_mask is not None and (has_loss := rows.loss_mask & ~keep).any():
        row = rows.first_row + row_of(rows.lengths, int(np.argmax(has_loss)))
        raise InputError(
            f"{where(unit, row)} has a loss on its padding; give padding the label {IGNORED}, or 0 in a mask, or leave "
            "it out (a tokenizer with padding=False)"
        )
    mask = None if rows.loss_mask is None else rows.loss_mask[keep]
    return rows._replace(flat=rows.flat[keep], lengths=_sums(keep, rows.lengths), loss_mask=mask)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The sum over each row, also over empty ones."""
    totals = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    stops = np.cumsum(lengths)
    sums: np.ndarray = totals[stops] - totals[stops - lengths]
    return sums


class _Place(NamedTuple):
    """A row's place, put in words when it is asked for, which is slow."""

    unit: WorkUnit
    row: int

    def __str__(self) -> str:
        return where(self.unit, self.row)

    def __format__(self, spec: str) -> str:
        return str(self)


def _split(unit: WorkUnit, rows: TokenRows, columns: dict[str, Column]) -> TokenRows:
    """The sequences of rows that were packed before."""
    positions = {name: columns[name] for name in POSITIONS if name in columns}
    if not positions or _counts_up(rows, positions):
        return rows
    read = {name: columns[name] for name in (PADDING, *POSITIONS) if name in columns}
    starts = {name: np.cumsum(column.counts) - column.counts for name, column in read.items()}
    lengths, numbers = [], []
    for row, length in enumerate(rows.lengths.tolist()):
        values = {
            name: column.values[starts[name][row] : starts[name][row] + column.counts[row]]
            for name, column in read.items()
            if column.is_given[row]
        }
        keep = values.pop(PADDING, np.empty(0)) == 1
        values = {name: array[keep] if array.shape == keep.shape else array for name, array in values.items()}
        place = _Place(unit, rows.first_row + row)
        bounds = sequence_bounds(place, length, values, otherwise="drop the column") if length else (0, 0)
        lengths += np.diff(bounds).tolist()
        numbers += [rows.first_row + row] * (len(bounds) - 1)
    as_array: dict[str, Any] = {"lengths": np.array(lengths, dtype=np.int64), "row_numbers": np.array(numbers)}
    return rows._replace(**as_array)


def _counts_up(rows: TokenRows, positions: dict[str, Column]) -> bool:
    """Whether the positions are those of one sequence a row, as is usual, and no row was padded."""
    if list(positions) != [POSITIONS[0]] or not np.array_equal(positions[POSITIONS[0]].counts, rows.lengths):
        return False
    expected = np.arange(len(rows.flat)) - np.repeat(np.cumsum(rows.lengths) - rows.lengths, rows.lengths)
    return np.array_equal(positions[POSITIONS[0]].values, expected)
