"""Documents of a work unit, one after another: files, JSON lines, FASTA records, rows of columns, samples of tars."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from lengthwise.core.column_names import LOSS_MASKS, PADDING, PROMPT_MASK
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief, parse_json
from lengthwise.index.document_limits import DEFAULT_LIMITS, Limits
from lengthwise.index.readers.columns import read_rows, read_text_column, read_token_column
from lengthwise.index.readers.compressed import end_of, is_compressed, open_unpacked
from lengthwise.index.readers.document import (
    BLANK,
    BYTE_ORDER_MARK,
    Document,
    OversizedValue,
    TokenRows,
    from_file,
    from_text,
    token_rows,
    where,
)
from lengthwise.index.readers.json_array import read_json_array
from lengthwise.index.readers.megatron import megatron_tokens, open_megatron
from lengthwise.index.readers.outside_reader import read_outside
from lengthwise.index.readers.token_columns import Column, ColumnsOfFirstRow, with_columns
from lengthwise.index.readers.unused_columns import unused_columns
from lengthwise.index.readers.webdataset import tar_samples
from lengthwise.index.source_file import Format, SourceFile, WorkUnit, check_unchanged, open_regular

_COLUMNS = (Format.PARQUET, Format.ARROW)
_PIECE_BYTES = 1 << 20
_BLANKS = b" \t\r\n\v\f"
"""Not counted as letters of a FASTA record, wherever they are in its lines."""
_NO_LETTERS = b"0123456789>"
"""No letters of a sequence: numbers of lines or positions, and a header that does not begin its line."""


def read_documents(unit: WorkUnit, *, field: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[Document]:
    """The documents of ``unit`` in order; one that is larger than ``limits`` allow comes without its text.

    Raises:
        InputError: a line or a row is malformed (naming file and line), or a file changed since it was listed.
    """
    if unit.format is Format.TEXT:
        for number, file in enumerate(unit.files):
            yield _read_text(number, file, limits.document)
    elif unit.format in (Format.JSONL, Format.JSON):
        for row, value in _rows(unit, field=field, limits=limits):
            yield from_text(row, value, unit)
    elif unit.format is Format.FASTA:
        yield from _read_fasta(unit, limits)
    elif unit.format in (Format.TAR, Format.READER):
        for row, value in _rows(unit, field=field, limits=limits):
            yield from_file(0, row, value) if isinstance(value, bytes) else from_text(row, value, unit)
    else:
        yield from read_text_column(unit, field=field, most_bytes=limits.document)


def read_token_rows(
    unit: WorkUnit, *, field: str, first_row: ColumnsOfFirstRow | None = None, limits: Limits = DEFAULT_LIMITS
) -> Iterator[TokenRows]:
    """Sequences of ready tokens, in order: a column, JSON lines, JSON members of a tar, or a Megatron data set.

    Columns beside the tokens say which of them have a loss, which are padding, and where sequences begin in rows that
    were packed before; with ``first_row``, every row has to say of the loss what that one does.
    """
    first_row = first_row or ColumnsOfFirstRow(ignores_loss=True)
    for rows, columns in read_token_columns(unit, field=field, first_row=first_row, limits=limits):
        yield with_columns(unit, rows, columns, first_row) if len(rows.lengths) else rows


def read_token_columns(
    unit: WorkUnit, *, field: str, first_row: ColumnsOfFirstRow, limits: Limits = DEFAULT_LIMITS
) -> Iterator[tuple[TokenRows, dict[str, Column]]]:
    """Rows of ready tokens as they are, and those of the columns beside them that are read, where there are any."""
    if unit.format in _COLUMNS:
        yield from read_token_column(unit, field=field, first_row=first_row)
        return
    if unit.format is Format.MEGATRON:
        yield token_rows(unit, 0, *megatron_tokens(open_megatron(*unit.files), unit.start, unit.stop)), {}
        return
    key = field.rpartition(":")[2] if unit.format is Format.TAR else field
    beside = first_row.names_read(key)
    for row, value in _rows(unit, field=field, limits=limits, beside=beside):
        if value is BLANK or isinstance(value, OversizedValue):
            large = value.size if isinstance(value, OversizedValue) else 0
            yield TokenRows(row, 1, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64), large), {}
            continue
        values = value if isinstance(value, dict) else {key: value}
        tokens = _integers(values[key], key, unit, row)
        unused = unused_columns(values, first_row, field=key, place=partial(where, unit, row))
        names = [name for name in beside if values.get(name) is not None and name not in unused]
        columns = {name: _column(values[name], name, unit, row) for name in names}
        rows = token_rows(unit, row, tokens, np.array([len(tokens)], dtype=np.int64))
        yield rows._replace(unused=unused), columns


def _column(value: Any, name: str, unit: WorkUnit, row: int) -> Column:
    is_mask = name in (*LOSS_MASKS, PROMPT_MASK, PADDING)
    if is_mask and isinstance(value, list) and set(map(type, value)) <= {int, bool, float}:
        numbers = np.array(value, dtype=np.float64 if float in map(type, value) else np.int64)
    else:
        numbers = _integers(value, name, unit, row)
    return Column(numbers, np.array([len(numbers)], dtype=np.int64), np.ones(1, dtype=bool))


def read_records(
    unit: WorkUnit, *, fields: tuple[str, ...], optional: tuple[str, ...] = (), limits: Limits = DEFAULT_LIMITS
) -> Iterator[tuple[int, Any]]:
    """The values of ``fields`` by name in each row of JSON lines or a table, and of ``optional`` ones that are there.

    Blank lines are ``BLANK``, lines that are too large an ``OversizedValue``.
    """
    if unit.format in _COLUMNS:
        yield from read_rows(unit, fields=fields, optional=optional)
        return
    yield from _read_json_rows(unit, limits, lambda line, row: _json_fields(line, fields, unit, row, optional=optional))


def read_objects(unit: WorkUnit, limits: Limits = DEFAULT_LIMITS) -> Iterator[dict[str, Any]]:
    """The rows of JSON lines, up to one that is no object, which reading it again explains."""
    for _, line in _read_json_lines(unit, limits):
        if isinstance(line, bytes):
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(document, dict):
                return
            yield document


def tells_tokens(unit: WorkUnit, *, field: str, limits: Limits = DEFAULT_LIMITS) -> bool | None:
    """Whether samples of a tar, or what a reader yields, are ready tokens, not text; None: none of them tells."""
    for _, value in _rows(unit, field=field, limits=limits):
        if value is not None and value != [] and value is not BLANK and not isinstance(value, OversizedValue):
            return isinstance(value, list)
    return None


def _integers(value: Any, field: str, unit: WorkUnit, row: int) -> np.ndarray:
    """A JSON list of whole numbers as an array; refuses anything else, such as booleans among them."""
    value = [] if value is None else value
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise InputError(f"{where(unit, row)}: {field!r} must be a list of whole numbers with one for each token")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        number = brief(max(value, key=abs))
        raise InputError(f"{where(unit, row)}: token id {number} is out of range") from None


def _rows(unit: WorkUnit, *, field: str, limits: Limits, beside: tuple[str, ...] = ()) -> Iterator[tuple[int, Any]]:
    """The values of ``field``; whole rows where rows are objects, and columns ``beside`` it are asked for."""
    if unit.format is Format.READER:
        return read_outside(unit, field=field, limits=limits)
    if unit.format is Format.TAR:
        return _read_tar(unit, field=field, limits=limits, beside=beside)
    if beside:
        return _read_json_rows(unit, limits, lambda line, row: _json_row(line, (field,), unit, row, beside))
    return _read_json_rows(unit, limits, lambda line, row: _json_value(line, field, unit, row))


def _read_text(number: int, file: SourceFile, most_bytes: int) -> Document:
    if file.size > most_bytes:
        return Document(number, 0, b"", "large", file.size)
    try:
        with open_regular(file.path) as opened:
            data = opened.read(most_bytes + 1)
    except OSError:
        return Document(number, 0, b"", "unreadable")
    check_unchanged(file)
    return from_file(number, 0, data)


def _skip_to_line(lines: BinaryIO, unit: WorkUnit) -> None:
    """Go to where the first line of the unit begins, or to its end if none does: a line may span many units."""
    if unit.start:
        lines.seek(unit.start - 1)
    while unit.start and lines.tell() < unit.stop:
        if lines.readline(min(_PIECE_BYTES, unit.stop - lines.tell())).endswith(b"\n"):
            return


def _read_lines(unit: WorkUnit, limits: Limits) -> Iterator[bytes | OversizedValue]:
    """Lines that start in the unit's bytes; a line is not cut where the unit ends."""
    most_bytes, stop = limits.document, end_of(unit)
    with open_unpacked(unit.files[0], limits) as lines:
        _skip_to_line(lines, unit)
        position = unit.start and lines.tell()
        while position < stop:
            line = lines.readline(most_bytes + 1)
            if not line and is_compressed(unit.files[0]):
                return
            if not line:
                raise InputError(
                    f"{unit.files[0].name} became shorter while it was indexed; index again with --restart"
                )
            position += len(line)
            if len(line) <= most_bytes or line.endswith(b"\n"):
                yield line
                continue
            size = len(line)
            while line and not line.endswith(b"\n"):
                line = lines.readline(_PIECE_BYTES)
                size += len(line)
            position += size - most_bytes - 1
            yield OversizedValue(size)


def _read_json_rows(unit: WorkUnit, limits: Limits, parse: Callable[[bytes, int], Any]) -> Iterator[tuple[int, Any]]:
    """What each line says; ``BLANK`` and ``OversizedValue`` as they are."""
    for row, line in _read_json_lines(unit, limits):
        yield row, parse(line, row) if isinstance(line, bytes) else line


def _read_json_lines(unit: WorkUnit, limits: Limits) -> Iterator[tuple[int, Any]]:
    """Lines, or rows of an array, as bytes, ``BLANK`` or an ``OversizedValue``."""
    if unit.format is Format.JSON:
        yield from enumerate(read_json_array(unit.files[0], limits))
        return
    for row, line in enumerate(_read_lines(unit, limits)):
        if isinstance(line, OversizedValue):
            yield row, line
            continue
        if not row and not unit.start:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.isspace() or not line:
            yield row, BLANK
            continue
        yield row, line
    check_unchanged(unit.files[0])


def _json_value(data: bytes, key: str, unit: WorkUnit, row: int) -> Any:
    return _json_fields(data, (key,), unit, row)[key]


def _json_fields(
    data: bytes, keys: tuple[str, ...], unit: WorkUnit, row: int, *, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields of a JSON object that are asked for."""
    document = _json_row(data, keys, unit, row, optional)
    return {key: document[key] for key in (*keys, *optional) if key in document}


def _json_row(
    data: bytes, keys: tuple[str, ...], unit: WorkUnit, row: int, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A JSON object: each of ``keys`` must be there, and none of them and of the ``optional`` ones twice."""
    what = "a line of JSON" if unit.format is Format.JSONL else "JSON"
    try:
        document = parse_json(data.rstrip(b"\r\n").decode(), finite=False)
        for key in (key for key in (*keys, *optional) if isinstance(document, dict) and key in document):
            if data.count(f'"{key}"'.encode()) > 1:
                _check_once(data, key, where(unit, row))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where(unit, row)} is not {what}: {error}; mend or remove it") from None
    if not isinstance(document, dict):
        raise InputError(f"{where(unit, row)}: expected a JSON object, found {type(document).__name__}")
    for key in keys:
        if key not in document:
            others = ", ".join(sorted(document)[:8]) or "none"
            raise InputError(f"{where(unit, row)} has no field {key!r}; choose with --field (fields here: {others})")
    return document


def _check_once(data: bytes, key: str, place: str) -> None:
    """Raise ``InputError`` if an object gives ``key`` twice, of which JSON's readers keep one without a word."""

    def count(pairs: list[tuple[str, Any]]) -> int:
        return sum(name == key for name, _ in pairs)

    if json.loads(data.decode(), object_pairs_hook=count) > 1:  # what the hook says of the outermost object
        raise InputError(f"{place} has the field {key!r} twice; which one is meant? Remove the other")


def _read_tar(unit: WorkUnit, *, field: str, limits: Limits, beside: tuple[str, ...] = ()) -> Iterator[tuple[int, Any]]:
    """What ``field`` names in each sample: a member's bytes, or after a colon a key of its JSON, ``beside`` others."""
    file = unit.files[0]
    extension, colon, key = field.partition(":")
    stop = None if unit.stop == file.size else unit.stop
    samples = tar_samples(file, start=unit.start, stop=stop, extension=extension.lower(), limits=limits)
    for row, sample in enumerate(samples):
        if sample.large:
            yield row, OversizedValue(sample.large)
            continue
        if sample.data is None:
            raise InputError(
                f"{where(unit, row)} has no member .{extension}, only .{', .'.join(sample.fields)}; choose with "
                "--field, and pack the members of a sample next to one another"
            )
        if colon and beside:
            yield row, _json_row(sample.data, (key,), unit, row, beside)
        else:
            yield row, _json_value(sample.data, key, unit, row) if colon else sample.data
    check_unchanged(file)


def _read_fasta(unit: WorkUnit, limits: Limits) -> Iterator[Document]:
    """Records whose header line starts in the unit's bytes, each read to its end, wherever that is."""
    most_bytes, stop = limits.document, end_of(unit)
    with open_unpacked(unit.files[0], limits) as lines:
        _skip_to_line(lines, unit)
        position, row, record = unit.start and lines.tell(), -1, _Record(most_bytes)
        begins, in_header = True, False  # whether what is read next begins a line, or goes on with a header
        while (row >= 0 or position < stop) and (piece := lines.readline(_PIECE_BYTES)):
            size, piece = len(piece), piece if position else piece.removeprefix(BYTE_ORDER_MARK)
            if b"\r" in piece.rstrip(b"\r\n"):
                raise _mac_line_ends(unit.files[0])
            if begins and piece.startswith(b">"):
                if row >= 0:
                    yield record.document(row)
                    record = _Record(most_bytes)
                if position >= stop:
                    return
                row, in_header = row + 1, True
            elif begins and piece.startswith(b";"):  # a comment
                in_header = True
            elif row >= 0:
                if begins or not in_header:
                    in_header = False
                    record.add(piece.translate(None, _BLANKS))
            elif begins and not unit.start and not piece.isspace():
                raise InputError(f"{unit.files[0].name} is not FASTA: text before the first line that starts with '>'")
            position += size
            begins = piece.endswith(b"\n")
        if row >= 0:
            yield record.document(row)
    check_unchanged(unit.files[0])


def _mac_line_ends(file: SourceFile) -> InputError:
    return InputError(
        f"{file.name} has line ends of old Macs (\\r alone), of which headers and letters cannot be told apart; write "
        "it with others: tr '\\r' '\\n' < FILE > NEW"
    )


class _Record:
    """The letters of a FASTA record, kept as far as a document may be large."""

    def __init__(self, most_bytes: int) -> None:
        self._data, self._size, self._most_bytes = bytearray(), 0, most_bytes

    def add(self, letters: bytes) -> None:
        """Append part of a line."""
        self._size += len(letters)
        if self._size <= self._most_bytes:
            self._data += letters

    def document(self, row: int) -> Document:
        """The record as a document."""
        if self._size > self._most_bytes:
            return Document(0, row, b"", "large", self._size)
        data = bytes(self._data)
        if not data.isascii():
            return Document(0, row, b"", "undecodable", reason="holds a letter that is not ASCII")
        if len(data.translate(None, _NO_LETTERS)) < len(data):
            return Document(0, row, b"", "undecodable", reason="holds digits or '>' among its letters")
        return Document(0, row, data)
