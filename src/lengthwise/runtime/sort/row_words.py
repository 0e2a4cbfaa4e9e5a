"""Rows as words: all columns' bits in as few integers as they need, compared one after the other.

A column takes only the bits between its smallest and its largest code over all ranks, so that (length, id) pairs, and
most metrics, are one integer of the machine: sorting them is sorting integers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.runtime.sort.order_codes import from_codes, to_codes

BLOCK = 1 << 16
"""Rows turned at a time, so that what lies between takes no memory to speak of."""
_INTEGERS = ((8, torch.int8), (16, torch.int16), (32, torch.int32), (64, torch.int64))


@dataclass(frozen=True)
class Field:
    """Bit field of one column inside a word."""

    column: int
    low: int
    """Its smallest code."""
    width: int
    """In bits."""
    shift: int
    """Bits below it."""


@dataclass(frozen=True)
class Word:
    """Columns in one integer, the first one in the highest bits."""

    fields: tuple[Field, ...]

    @property
    def num_bits(self) -> int:
        """Number of bits in use, of 64."""
        return max(1, self.fields[0].shift + self.fields[0].width)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer that holds it."""
        return next(dtype for bits, dtype in _INTEGERS if self.num_bits <= bits)

    @property
    def _middle(self) -> int:
        """Offset that is subtracted, so that unsigned bits compare as signed integers; modulo 2^64."""
        return 1 << (self.num_bits - 1) if self.num_bits < 64 else -(1 << 63)

    def encode(self, rows: Tensor) -> Tensor:
        """Pack ``rows`` [n, D] into words [n]."""
        words = torch.empty(len(rows), dtype=self.dtype, device=rows.device)
        for block in blocks(len(rows)):
            packed = torch.zeros(len(rows[block]), dtype=torch.int64, device=rows.device)
            for field in self.fields:
                packed += (to_codes(rows[block, field.column]) - field.low) << field.shift
            words[block] = packed.sub_(self._middle)
        return words

    def decode(self, words: Tensor, rows: Tensor) -> None:
        """Fill the columns of ``rows`` [n, D] from ``words`` [n]."""
        for block in blocks(len(words)):
            packed = words[block].to(torch.int64) + self._middle
            for field in self.fields:
                mask = (1 << field.width) - 1 if field.width < 64 else -1
                codes = ((packed >> field.shift) & mask) + field.low
                rows[block, field.column] = from_codes(codes, rows.dtype)


def layout(ranges: Sequence[tuple[int, int]]) -> tuple[Word, ...]:
    """The words of columns whose codes lie between these two, over all ranks."""
    groups: list[list[tuple[int, int, int]]] = [[]]
    used = 0
    for column, (low, high) in enumerate(ranges):
        width = (high - low).bit_length()
        if used + width > 64:
            groups.append([])
            used = 0
        groups[-1].append((column, low, width))
        used += width
    return tuple(Word(tuple(_fields(group))) for group in groups)


def blocks(num_rows: int) -> Iterator[slice]:
    """``num_rows`` in slices of ``BLOCK``."""
    return (slice(start, min(start + BLOCK, num_rows)) for start in range(0, num_rows, BLOCK))


def _fields(group: Sequence[tuple[int, int, int]]) -> Iterator[Field]:
    shift = sum(width for _, _, width in group)
    for column, low, width in group:
        shift -= width
        yield Field(column, low, width, shift)
