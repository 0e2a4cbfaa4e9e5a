"""Shards of samples in tar archives, as WebDataset lays them out: members of one sample share their path up to the
first dot of the file name and follow one another; what comes after that dot names the field.
"""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import DEFAULT_LIMITS, Limits
from lengthwise.index.readers.compressed import CUT_OFF, check_unpacked, damaged, is_compressed
from lengthwise.index.source_file import SourceFile, check_unchanged, open_source

_BLOCK = 512
_REGULAR, _LINK, _EMPTY = (b"0", b"\0", b"7"), (b"1", b"2"), (b"1", b"2", b"3", b"4", b"5", b"6")
_PAX, _LONG_NAME, _SPARSE = b"x", b"L", b"S"
_PASSED_OVER = (b"g", b"K", b"V")
"""Headers for all members, targets of links and volume labels say nothing of what a member holds."""
_HEADER_BYTES = 1 << 20
"""Most bytes of a name or an extended header."""
_MOST_DIGITS = 20
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")


class _Member(NamedTuple):
    """A regular file or a link in an archive; ``start`` is where its headers begin."""

    name: str
    start: int
    size: int
    is_link: bool = False


@dataclass
class TarSample:
    """Consecutive members with one key."""

    key: str
    start: int
    fields: list[str] = field(default_factory=list)
    data: bytes | None = None
    """What the member asked for holds; None if there is none."""
    large: int = 0
    """Bytes of the member asked for if it is larger than a document may be, and not read."""


def tar_slices(file: SourceFile, unit_bytes: int) -> list[tuple[int, int]]:
    """First and last byte of whole samples, about ``unit_bytes`` a slice; all of a compressed archive is one."""
    if is_compressed(file) or file.size <= unit_bytes:
        return [(0, file.size)]
    starts = [0]
    for sample in tar_samples(file):
        if sample.start - starts[-1] >= unit_bytes:
            starts.append(sample.start)
    return list(zip(starts, [*starts[1:], file.size]))


def tar_samples(
    file: SourceFile,
    *,
    start: int = 0,
    stop: int | None = None,
    extension: str = "",
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[TarSample]:
    """The samples whose first member starts in the bytes given, with what the member ``extension`` of each holds.

    Raises:
        InputError: the archive is damaged or cut off, unpacks to more than ``limits`` allow, or a sample has two
            members of one extension, or a link where its text should be.
    """
    check_unchanged(file)
    sample: TarSample | None = None
    for member, stream in _members(file, start, limits):
        key, suffix = _split_name(member.name)
        if not suffix or (key.startswith("__") and member.name.endswith("__")):
            continue
        if member.is_link:
            if suffix == extension:
                raise InputError(f"{file.name}: the member {member.name} is a link; pack the file itself")
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            if stop is not None and member.start >= stop:
                return
            sample = TarSample(key, member.start)
        if suffix in sample.fields:
            raise InputError(f"{file.name}: two members of sample {key!r} are named .{suffix}; remove one")
        sample.fields.append(suffix)
        if suffix == extension and member.size > limits.document:
            sample.large = member.size
        elif suffix == extension:
            sample.data = _read(file, stream, member.size)
    if sample is not None:
        yield sample


def _split_name(name: str) -> tuple[str, str]:
    """The key of a member and its field, lower case; no field if its file name has no dot, or starts with one."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem else (name, "")


def _open(file: SourceFile) -> BinaryIO:
    opened = open_source(file)
    return gzip.open(opened, "rb") if is_compressed(file) else opened  # type: ignore[return-value]


def _members(file: SourceFile, start: int, limits: Limits) -> Iterator[tuple[_Member, BinaryIO]]:
    """Regular files and links of the archive from ``start`` on, each with the stream placed at its data."""
    position = begun = start
    extended: dict[bytes, bytes] = {}  # what extension headers say of the member after them
    with _open(file) as stream:
        try:
            while header := _header(file, stream, position, limits):
                kind, size = header[156:157], _number(header[124:136])
                name = extended.get(b"path", _plain_name(header)).decode(errors="backslashreplace")
                if kind == _SPARSE or any(key.startswith(b"GNU.sparse.") for key in extended):
                    raise InputError(f"{file.name}: the member at byte {position:,} is a sparse file; pack it plainly")
                if kind in _REGULAR:
                    size = _pax_size(extended, size)
                elif kind in _EMPTY:
                    size = 0
                _check_size(file, position, kind, size, limits)
                if kind in _REGULAR + _LINK:
                    yield _Member(name, begun, size, kind in _LINK), stream
                elif kind == _PAX:
                    extended |= _pax_records(_read(file, stream, size))
                elif kind == _LONG_NAME:
                    extended[b"path"] = _read(file, stream, size).rstrip(b"\0")
                position += _BLOCK - (-size // _BLOCK) * _BLOCK
                if kind in _REGULAR + _EMPTY:
                    begun, extended = position, {}
        except CUT_OFF as error:
            raise damaged(file, error) from None


def _check_size(file: SourceFile, position: int, kind: bytes, size: int, limits: Limits) -> None:
    """Refuse a member that cannot be what its header says, before any of it is read."""
    place = f"{file.name}: the header at byte {position:,}"
    if kind not in (*_REGULAR, *_EMPTY, *_PASSED_OVER, _PAX, _LONG_NAME):
        raise InputError(f"{place} is of type {kind.decode('latin-1')!r}, which is not read here; pack files plainly")
    if kind in (_PAX, _LONG_NAME) and size > _HEADER_BYTES:
        raise InputError(
            f"{place} has {size:,} bytes to name a member, and at most {_HEADER_BYTES:,} are read; it is damaged"
        )
    end = position + _BLOCK + size
    if not is_compressed(file) and end > file.size:
        has = max(file.size - position - _BLOCK, 0)
        raise InputError(
            f"{file.name} is cut off: its member at byte {position:,} needs {size:,} bytes and has {has:,}; "
            "write it again"
        )
    check_unpacked(file, end, limits)


def _pax_size(told: dict[bytes, bytes], size: int) -> int:
    """The size of a member, which an extended header may replace."""
    digits = told.get(b"size")
    if digits is None:
        return size
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise EOFError(f"an extended header gives the size {digits[:40].decode(errors='backslashreplace')!r}")
    return int(digits)


def _header(file: SourceFile, stream: BinaryIO, position: int, limits: Limits) -> bytes:
    """The header block at ``position``; empty at the archive's end mark."""
    stream.seek(position)
    block = stream.read(_BLOCK)
    if len(block) < _BLOCK:
        raise InputError(
            f"{file.name} is cut off: it ends before byte {position:,} without its end mark; write it again"
        )
    if not block.strip(b"\0"):
        while rest := stream.read(1 << 20):
            check_unpacked(file, stream.tell(), limits)
            if rest.strip(b"\0"):
                raise InputError(
                    f"{file.name} goes on after its end mark at byte {position:,}, where readers stop; "
                    "archives cannot be joined end to end, pack them again"
                )
        return b""
    is_header = _number(block[148:156]) == sum(block) - sum(block[148:156]) + 8 * ord(" ")
    is_header &= _number(block[124:136]) >= 0
    if not is_header:
        raise InputError(f"{file.name} has no tar header at byte {position:,}: it is damaged, or no tar archive")
    return block


def _read(file: SourceFile, stream: BinaryIO, size: int) -> bytes:
    try:
        data = stream.read(size)
    except CUT_OFF as error:
        raise damaged(file, error) from None
    if len(data) < size:
        raise InputError(
            f"{file.name} is cut off: its last member needs {size:,} bytes and has {len(data):,}; write it again"
        )
    return data


def _number(digits: bytes) -> int:
    """A number of a header: octal, or big-endian behind a byte with its highest bit set; -1 if it is none."""
    if digits[0] & 0x80:
        return -1 if digits[0] == 0xFF else int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    match = _OCTAL.fullmatch(digits)
    return -1 if match is None else int(match[1] or b"0", 8)


def _plain_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Records of the form ``length key=value``, each with its newline."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + _MOST_DIGITS + 1)
        digits = data[start:space] if space > start else b""
        size = int(digits) if digits.isdigit() else 0
        if not len(digits) < size <= len(data) - start:
            raise EOFError("an extended header is not readable")
        key, _, value = data[space + 1 : start + size - 1].partition(b"=")
        records[key] = value
        start += size
    return records
