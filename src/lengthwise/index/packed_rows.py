"""Where the sequences of a row lie that was packed before it became an item."""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError

OF_ITEMS = "make the forward's arguments with inputs=lambda micro_batch: {...}"
"""The other way out for items of ``lengthwise.prepare``."""


def sequence_bounds(
    where: object, length: int, columns: dict[str, Any], *, otherwise: str = OF_ITEMS
) -> tuple[int, ...]:
    """Begin of each sequence in a row of ``length`` tokens, and the row's end.

    ``position_ids`` begin at 0 with each sequence and count up by one; ``seq_idx`` is the number of the sequence;
    ``seq_lengths`` are their lengths. ``where`` is the row in words, ``otherwise`` what else than leaving a column out
    helps.

    Raises:
        InputError: a column says something else, or they contradict one another.
    """
    bounds_by_column = {}
    for name, column in columns.items():
        values = np.asarray(column)
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise InputError(
                f"{name} of {where} is {values.dtype} of shape {values.shape}; packs know positions that count tokens "
                f"alone: leave it out, or {otherwise}"
            )
        bounds_by_column[name] = _BOUNDS[name](where, length, values, otherwise)
    different = set(bounds_by_column.values())
    if len(different) > 1:
        words = " and ".join(f"{name} at {list(bounds[:-1])[:5]}" for name, bounds in bounds_by_column.items())
        raise InputError(f"{where} has sequences that begin by {words}; leave out the columns that are wrong")
    return different.pop() if different else (0, length)


def _by_positions(where: object, length: int, positions: np.ndarray, otherwise: str) -> tuple[int, ...]:
    starts = np.flatnonzero(positions == 0)
    bounds = (*starts.tolist(), length)
    expected = np.concatenate([np.arange(end - start) for start, end in pairwise(bounds)] or [np.array([])])
    if not np.array_equal(positions, expected):
        raise InputError(
            f"position_ids of {where} do not count up from 0 in each of its sequences, one position per token; leave "
            f"them out (positions are counted in each sequence), or {otherwise}"
        )
    return bounds


def _by_index(where: object, length: int, index: np.ndarray, otherwise: str) -> tuple[int, ...]:
    if len(index) != length:
        raise InputError(f"seq_idx of {where} has {len(index)} numbers for {length} tokens; give one per token")
    return (0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), length)


def _by_lengths(where: object, length: int, lengths: np.ndarray, otherwise: str) -> tuple[int, ...]:
    if int(lengths.sum()) != length or (lengths < 1).any():
        raise InputError(
            f"seq_lengths of {where} are {int(lengths.sum())} tokens in all, and it has {length}; give the length of "
            "each of its sequences"
        )
    return (0, *accumulate(lengths.tolist()))


_BOUNDS = {"position_ids": _by_positions, "seq_idx": _by_index, "seq_lengths": _by_lengths}
