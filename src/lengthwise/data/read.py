"""Documents of a work unit, one after another: files, JSON lines, FASTA records, rows of columns, samples of tars."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.data.documents import (
    BLANK,
    Document,
    TokenRows,
    from_file,
    from_text,
    open_source,
    token_rows,
    where,
)
from lengthwise.data.megatron import megatron_tokens, open_megatron
from lengthwise.data.read_columns import column_kind, read_text_column, read_token_column
from lengthwise.data.source import Format, SourceFile, check_unchanged
from lengthwise.data.tar import tar_samples
from lengthwise.data.units import Unit

_COLUMNS = (Format.PARQUET, Format.ARROW)


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
    elif unit.format is Format.TAR:
        for row, value in _read_tar(unit, field=field):
            yield from_file(0, row, value) if isinstance(value, bytes) else from_text(row, value, unit)
    else:
        yield from read_text_column(unit, field=field)


def read_token_rows(unit: Unit, *, field: str) -> Iterator[TokenRows]:
    """Rows of ready tokens, in order: a column, JSON lines, JSON members of a tar, or a Megatron data set."""
    if unit.format in _COLUMNS:
        yield from read_token_column(unit, field=field)
        return
    if unit.format is Format.MEGATRON:
        yield token_rows(unit, 0, *megatron_tokens(open_megatron(*unit.files), unit.start, unit.stop))
        return
    for row, value in _read_jsonl(unit, field=field) if unit.format is Format.JSONL else _read_tar(unit, field=field):
        if value is BLANK:
            yield TokenRows(row, 1, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
            continue
        try:
            tokens = np.asarray([] if value is None else value)
        except ValueError:  # lists of lists
            tokens = np.asarray("")
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise InputError(f"{where(unit, row)}: {field!r} must be a list of whole numbers like the first row's")
        yield token_rows(unit, row, tokens, np.array([len(tokens)], dtype=np.int64))


def holds_tokens(unit: Unit, *, field: str) -> bool:
    """Whether ``field`` holds ready tokens rather than text, by the type of the column or the first row of JSON."""
    if unit.format in _COLUMNS:
        return column_kind(unit, field) == "tokens"
    if unit.format not in (Format.JSONL, Format.TAR):
        return unit.format is Format.MEGATRON
    rows = _read_jsonl(unit, field=field) if unit.format is Format.JSONL else _read_tar(unit, field=field)
    return isinstance(next((value for _, value in rows if value is not BLANK), None), list)


def _read_text(number: int, file: SourceFile) -> Document:
    try:
        data = Path(file.path).read_bytes()
    except OSError:
        return Document(number, 0, b"", "unreadable")
    check_unchanged(file)
    return from_file(number, 0, data)


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
        yield row, _json_value(line, field, unit, row)


def _json_value(data: bytes, key: str, unit: Unit, row: int) -> Any:
    try:
        document = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        what = "a line of JSON" if unit.format is Format.JSONL else "JSON"
        raise InputError(f"{where(unit, row)} is not {what}: {error}; mend or remove it") from None
    if not isinstance(document, dict):
        raise InputError(f"{where(unit, row)}: expected a JSON object, found {type(document).__name__}")
    if key not in document:
        known = ", ".join(sorted(document)[:8]) or "none"
        raise InputError(f"{where(unit, row)} has no field {key!r}; choose with --field (fields here: {known})")
    return document[key]


def _read_tar(unit: Unit, *, field: str) -> Iterator[tuple[int, Any]]:
    """What ``field`` names in each sample: a member's bytes, or after a colon a key of its JSON."""
    file = unit.files[0]
    extension, colon, key = field.partition(":")
    stop = None if unit.stop == file.size else unit.stop
    for row, sample in enumerate(tar_samples(file, start=unit.start, stop=stop, extension=extension.lower())):
        if sample.data is None:
            raise InputError(
                f"{where(unit, row)} has no member .{extension}, only .{', .'.join(sample.fields)}; choose with "
                "--field, and pack the members of a sample next to one another"
            )
        yield row, _json_value(sample.data, key, unit, row) if colon else sample.data


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
