"""Arrow files, memory-mapped: IPC streams as Hugging Face datasets are kept in, and Feather (IPC) files.

Both are a schema and record batches, one message after another. Only the few bytes that say how long each message is
are read to find where batches start, so that any batch can be reached without reading those before it.
"""

import mmap
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from lengthwise.core.errors import InputError, missing_package
from lengthwise.index.source_file import SourceFile, check_unchanged, explaining

_FILE_MAGIC, _FEATHER_1_MAGIC = b"ARROW1", b"FEA1"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


class _Message(NamedTuple):
    kind: int
    start: int
    stop: int
    num_rows: int


def arrow_slices(file: SourceFile, unit_bytes: int) -> list[tuple[int, int]]:
    """First and last byte of whole record batches, about ``unit_bytes`` a slice.

    With dictionary-encoded columns the file is one slice, ``(0, size)``: their values may be anywhere before a batch.
    """
    slices: list[tuple[int, int]] = []
    start = stop = 0
    for message in _messages(file):
        if message.kind == _DICTIONARY:
            return [(0, file.size)]
        if message.kind != _BATCH:
            continue
        start, stop = start or message.start, message.stop
        if stop - start >= unit_bytes:
            slices.append((start, stop))
            start = 0
    return [*slices, (start, stop)] if start else slices


def arrow_schema(file: SourceFile) -> Any:
    """Schema of an Arrow file."""
    arrow = _import_arrow()
    with explaining(f"{file.name} is not an Arrow file"), arrow.memory_map(file.path) as source:
        return _open_reader(arrow, source).schema


def arrow_batches(file: SourceFile, start: int, stop: int) -> Iterator[Any]:
    """The record batches of one slice; their buffers lie in the mapped file."""
    arrow = _import_arrow()
    check_unchanged(file)
    schema = arrow_schema(file)
    damaged = f"{file.name} is damaged in bytes {start:,} to {stop:,}"
    with explaining(damaged, "; write it again"), arrow.memory_map(file.path) as source:
        if not start:
            yield from _all_batches(_open_reader(arrow, source))
            return
        source.seek(start)
        while source.tell() < stop:
            yield arrow.ipc.read_record_batch(arrow.ipc.read_message(source), schema)


def arrow_rows_before(file: SourceFile, stop: int) -> int:
    """Rows of the record batches that end by byte ``stop``."""
    return sum(message.num_rows for message in _messages(file) if message.stop <= stop)


def _import_arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise missing_package("reading Arrow", "pyarrow") from None
    return pyarrow


def _open_reader(arrow: Any, source: Any) -> Any:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    return arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)


def _all_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "get_batch"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _messages(file: SourceFile) -> Iterator[_Message]:
    """The messages of the file; refuses one that does not reach its end."""
    _import_arrow()
    check_unchanged(file)
    if not file.size:
        raise InputError(f"{file.name} is not an Arrow file: it is empty")
    with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(_FEATHER_1_MAGIC)] == _FEATHER_1_MAGIC:
            raise InputError(f"{file.name} is Feather of version 1; write it again as version 2 (Arrow IPC)")
        is_file = data[: len(_FILE_MAGIC)] == _FILE_MAGIC
        if is_file and (file.size < 32 or data[-len(_FILE_MAGIC) :] != _FILE_MAGIC):
            raise InputError(f"{file.name} is cut off at byte {file.size:,}: its footer is missing; write it again")
        position = 8 if is_file else 0
        try:
            while message := _parse(data, position):
                if message.stop > file.size:
                    raise InputError(
                        f"{file.name} is cut off at byte {file.size:,}: the record batch that starts at byte "
                        f"{message.start:,} ends at {message.stop:,}; write it again"
                    )
                yield message
                position = message.stop
        except struct.error:
            if position >= file.size > 0:
                why = f"it ends at byte {file.size:,} without its end mark"
            else:
                why = f"there is no message at byte {position:,}"
            hint = "it was not written to its end, or is no Arrow file" if position else "is it Arrow at all?"
            raise InputError(f"{file.name} cannot be read as Arrow: {why}; {hint}") from None


def _parse(data: mmap.mmap, start: int) -> _Message | None:
    """The message at ``start`` by its flatbuffer header; None at the end mark. ``struct.error`` if there is none."""
    mark, size = struct.unpack_from("<II", data, start)
    if mark != _CONTINUATION:
        raise struct.error("no continuation mark")
    if not size:
        return None
    header = start + 8
    root = header + struct.unpack_from("<I", data, header)[0]
    kind = _field(data, root, 1, "<B")
    body = _field(data, root, 3, "<q")
    if kind not in (_SCHEMA, _DICTIONARY, _BATCH) or body < 0 or (start <= 8) != (kind == _SCHEMA):
        raise struct.error("no message")
    num_rows = 0
    if kind == _BATCH:
        table = _field_at(data, root, 2)
        num_rows = _field(data, table + struct.unpack_from("<I", data, table)[0], 0, "<q")
    return _Message(kind, start, header + size + body, num_rows)


def _field_at(data: mmap.mmap, table: int, number: int) -> int:
    """Where field ``number`` of a flatbuffer table lies; 0 if it has its default value."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + offset if offset else 0


def _field(data: mmap.mmap, table: int, number: int, kind: str) -> int:
    position = _field_at(data, table, number)
    return int(struct.unpack_from(kind, data, position)[0]) if position else 0
