"""One document of a source: its text or why there is none, and its place in words."""

import sys
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import Limits
from lengthwise.index.readers.arrow import arrow_rows_before
from lengthwise.index.readers.webdataset import tar_samples
from lengthwise.index.source_file import Format, SourceFile, WorkUnit, open_parquet, open_source


class Document(NamedTuple):
    """One document as UTF-8, or the reason why there is none."""

    file: int
    """Index into the unit's files."""
    row: int
    """Line, row or record, counted from 0 where the unit starts."""
    data: bytes
    problem: str = ""
    """Empty, or ``binary``, ``undecodable``, ``unreadable``, ``large``; ``blank`` for a line that is no document."""
    size: int = 0
    """Bytes of a document that is ``large``."""
    reason: str = ""
    """What makes it ``undecodable``, in words; empty: its bytes are not UTF-8."""


_BINARY_PROBE_BYTES = 8 << 10
_BLOCK_BYTES = 1 << 20
_READ_BEFORE = Limits(ratio=sys.maxsize)
"""Limits of what has been read before, and was not refused."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

ROW_NAMES = {Format.JSONL: "line", Format.FASTA: "record", Format.MEGATRON: "document", Format.TAR: "sample"}
"""What a row of a format is called, if not a row."""
BLANK = object()
"""Stands for the value of a blank line."""


class OversizedValue(NamedTuple):
    """Stands for the value of a line or member that is larger than a document may be."""

    size: int


class TokenRows(NamedTuple):
    """Consecutive rows that hold tokens already; a blank line or one that is too large is a row without a length."""

    first_row: int
    num_rows: int
    flat: np.ndarray
    lengths: np.ndarray
    large: int = 0
    """Bytes of a row that is too large; 0: it is not."""
    loss_mask: np.ndarray | None = None
    """Of each token whether it has a loss; None: the rows do not say it."""
    row_numbers: np.ndarray | None = None
    """The row of each length, counted as ``first_row`` is, where rows hold several sequences; None: each has one."""
    unused: tuple[str, ...] = ()
    """Names of the columns that the rows have and that are not read."""


def from_text(row: int, value: Any, unit: WorkUnit) -> Document:
    """The document of a value that should be text; a missing value and an empty list are empty documents."""
    if value is None or value == []:
        return Document(0, row, b"")
    if value is BLANK:
        return Document(0, row, b"", "blank")
    if isinstance(value, OversizedValue):
        return Document(0, row, b"", "large", value.size)
    if not isinstance(value, str):
        raise InputError(f"{where(unit, row)}: expected text, found {type(value).__name__}; choose with --field")
    try:
        return Document(0, row, value.encode())
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell and UTF-8 cannot
        return Document(0, row, b"", "undecodable", reason="holds half of a surrogate pair, which UTF-8 cannot write")


def from_file(number: int, row: int, data: bytes) -> Document:
    """The document a whole text file holds, without the byte order mark that some editors write first."""
    data = data.removeprefix(BYTE_ORDER_MARK)
    if b"\0" in data[:_BINARY_PROBE_BYTES]:
        return Document(number, row, b"", "binary")
    return from_utf8(number, row, data)


def from_utf8(number: int, row: int, data: bytes | None) -> Document:
    """The document of bytes that should be UTF-8; missing ones are an empty document."""
    try:
        (data or b"").decode()
    except UnicodeDecodeError:
        return Document(number, row, b"", "undecodable")
    return Document(number, row, data or b"")


def token_rows(unit: WorkUnit, first_row: int, flat: np.ndarray, lengths: np.ndarray) -> TokenRows:
    """Consecutive rows of token ids of any integer type, end to end; refuses what cannot be an id, by its row."""
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= 1 << 32):
        position = int(np.argmin(flat)) if int(flat.min()) < 0 else int(np.argmax(flat))
        place = where(unit, first_row + row_of(lengths, position))
        raise InputError(f"{place}: token id {flat[position]} is out of range; ids are 0 to {(1 << 32) - 1:,}")
    return TokenRows(first_row, len(lengths), flat.astype(np.uint32, copy=False), lengths)


def row_of(lengths: np.ndarray, at: int) -> int:
    """The row that holds element ``at`` of rows laid end to end."""
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))


def where(unit: WorkUnit, row: int, *, file: int = 0, rows_before: int | None = None) -> str:
    """The place of a document in words, such as ``shard.jsonl:17``.

    ``rows_before``: rows of the file before the unit; None: they are counted, which is slow in a large file.
    """
    source = unit.files[file]
    if unit.format is Format.TEXT:
        return source.name
    number = row + (_rows_before(unit) if rows_before is None else rows_before)
    if unit.format is Format.JSONL:
        return f"{source.name}:{1 + number}"
    if unit.format is Format.TAR:
        key = next(islice(tar_samples(source, start=unit.start, limits=_READ_BEFORE), row, None)).key
        return f"{source.name}, sample {number} ({key})"
    return f"{source.name}, {ROW_NAMES.get(unit.format, 'row')} {number}"


def _rows_before(unit: WorkUnit) -> int:
    """Rows of the unit's file before the unit; slow: it counts from the start of the file."""
    source = unit.files[0]
    if unit.format is Format.JSONL:
        return _count_lines(source, unit.start)
    if unit.format is Format.FASTA:
        return _count_lines(source, unit.start, marker=b">")
    if unit.format is Format.PARQUET:
        metadata = open_parquet(source).metadata
        return sum(metadata.row_group(group).num_rows for group in range(unit.start))
    if unit.format is Format.ARROW:
        return arrow_rows_before(source, unit.start)
    if unit.format is Format.TAR:
        return sum(1 for _ in tar_samples(source, stop=unit.start, limits=_READ_BEFORE)) if unit.start else 0
    return unit.start


def _count_lines(file: SourceFile, stop: int, *, marker: bytes = b"") -> int:
    """Lines that begin before byte ``stop``, and with ``marker``; in bounded memory, however long they are."""
    if not stop:
        return 0
    count, last = 0, b""
    with open_source(file) as data:
        left, block = stop - 1 + len(marker), b"\n"  # the first line begins as if after another
        while block:
            joined = last + block
            count += joined.count(b"\n" + marker)
            last = joined[-1:] if marker else b""
            block = data.read(min(_BLOCK_BYTES, left))
            left -= len(block)
    return count
