"""Documents of a work unit, one after another: text files, JSON lines, FASTA records, Parquet rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.data.documents import BLANK, Document, TokenRows, check_tokens, from_text, open_source, where
from lengthwise.data.read_parquet import column_kind, read_parquet_text, read_parquet_tokens
from lengthwise.data.source import Format, SourceFile
from lengthwise.data.units import Unit

_BINARY_PROBE_BYTES = 8 << 10


def read_documents(unit: Unit, *, field: str) -> Iterator[Document]:
    """The documents of ``unit`` in order.

    Raises:
        InputError: a line or a row is malformed (naming file and line), or a file changed since it was listed.
    """
    if unit.format is Format.TEXT:
        for number, file in enumerate(unit.files):
            yield _read_text(number, file)
    elif unit.format is Format.JSONL:
        for row, value in _read_jsonl(unit, field=field):
            yield from_text(row, value, unit)
    elif unit.format is Format.FASTA:
        yield from _read_fasta(unit)
    else:
        yield from read_parquet_text(unit, field=field)


def read_token_rows(unit: Unit, *, field: str) -> Iterator[TokenRows]:
    """Rows of ready tokens of a Parquet or JSON-lines unit, in order."""
    if unit.format is Format.PARQUET:
        yield from read_parquet_tokens(unit, field=field)
        return
    for row, value in _read_jsonl(unit, field=field):
        if value is BLANK:
            yield TokenRows(row, 1, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
            continue
        try:
            tokens = np.asarray([] if value is None else value)
        except ValueError:  # lists of lists
            tokens = np.asarray("")
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise InputError(f"{where(unit, row)}: {field!r} must be a list of whole numbers like the first row's")
        check_tokens(tokens, unit, row)
        yield TokenRows(row, 1, tokens.astype(np.uint32), np.array([len(tokens)], dtype=np.int64))


def holds_tokens(unit: Unit, *, field: str) -> bool:
    """Whether ``field`` holds ready tokens rather than text, by the schema (Parquet) or the first row (JSON lines)."""
    if unit.format is Format.PARQUET:
        return column_kind(unit.files[0], field) == "tokens"
    if unit.format is not Format.JSONL:
        return False
    values = (value for _, value in _read_jsonl(unit, field=field) if value is not BLANK)
    return isinstance(next(values, None), list)


def _read_text(number: int, file: SourceFile) -> Document:
    try:
        data = Path(file.path).read_bytes()
    except OSError:
        return Document(number, 0, b"", "unreadable")
    if len(data) != file.size:
        raise InputError(
            f"{file.name} changed while it was indexed: {file.size:,} bytes before, {len(data):,} now; "
            "index again with --restart once nothing writes to it"
        )
    if b"\0" in data[:_BINARY_PROBE_BYTES]:
        return Document(number, 0, b"", "binary")
    try:
        data.decode()
    except UnicodeDecodeError:
        return Document(number, 0, b"", "undecodable")
    return Document(number, 0, data)


def _read_lines(unit: Unit) -> Iterator[bytes]:
    """Lines that start in the unit's bytes; a line is not cut where the unit ends."""
    with open_source(unit.files[0]) as lines:
        if unit.start:
            lines.seek(unit.start - 1)
            lines.readline()
        position = lines.tell()
        while position < unit.stop:
            line = lines.readline()
            if not line:
                raise InputError(
                    f"{unit.files[0].name} became shorter while it was indexed; index again with --restart"
                )
            position += len(line)
            yield line


def _read_jsonl(unit: Unit, *, field: str) -> Iterator[tuple[int, Any]]:
    for row, line in enumerate(_read_lines(unit)):
        if not row and not unit.start:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.isspace() or not line:
            yield row, BLANK
            continue
        try:
            document = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            hint = "mend or remove the line"
            raise InputError(f"{where(unit, row)} is not a line of JSON: {error}; {hint}") from None
        if not isinstance(document, dict):
            raise InputError(f"{where(unit, row)}: expected a JSON object, found {type(document).__name__}")
        if field not in document:
            known = ", ".join(sorted(document)[:8]) or "none"
            raise InputError(f"{where(unit, row)} has no field {field!r}; choose with --field (fields here: {known})")
        yield row, document[field]


def _read_fasta(unit: Unit) -> Iterator[Document]:
    """Records whose header line starts in the unit's bytes, each read to its end, wherever that is."""
    with open_source(unit.files[0]) as lines:
        if unit.start:
            lines.seek(unit.start - 1)
            lines.readline()
        position, row, data = lines.tell(), -1, bytearray()
        for line in lines:
            if line.startswith(b">"):
                if row >= 0:
                    yield _fasta_document(row, data)
                    data = bytearray()
                if position >= unit.stop:
                    return
                row += 1
            elif row >= 0:
                data += line.strip()
            elif not unit.start and not line.isspace():
                raise InputError(f"{unit.files[0].name} is not FASTA: text before the first line that starts with '>'")
            elif position >= unit.stop:
                return
            position += len(line)
        if row >= 0:
            yield _fasta_document(row, data)


def _fasta_document(row: int, data: bytearray) -> Document:
    return Document(0, row, bytes(data)) if data.isascii() else Document(0, row, b"", "undecodable")
