"""Shards of samples in tar archives, as WebDataset lays them out: members of one sample share their path up to the
first dot of the file name and follow one another; what comes after that dot names the field.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from lengthwise.core.errors import InputError
from lengthwise.data.source import SourceFile, check_unchanged

_BLOCK = 512
_REGULAR, _EMPTY = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
_PAX, _LONG_NAME, _SPARSE = b"x", b"L", b"S"
_CUT_OFF = (EOFError, zlib.error, gzip.BadGzipFile)


class _Member(NamedTuple):
    """A regular file in an archive; ``start`` is where its headers begin."""

    name: str
    start: int
    size: int


@dataclass
class Sample:
    """Consecutive members with one key."""

    key: str
    start: int
    fields: list[str] = field(default_factory=list)
    data: bytes | None = None
    """What the member asked for holds; None if there is none."""


def is_compressed(file: SourceFile) -> bool:
    """Whether the archive can only be read from its start."""
    return file.name.lower().endswith(("gz", "tgz"))


def tar_slices(file: SourceFile, unit_bytes: int) -> list[tuple[int, int]]:
    """First and last byte of whole samples, about ``unit_bytes`` a slice; all of a compressed archive is one."""
    if is_compressed(file) or file.size <= unit_bytes:
        return [(0, file.size)]
    starts = [0]
    for sample in tar_samples(file):
        if sample.start - starts[-1] >= unit_bytes:
            starts.append(sample.start)
    return list(zip(starts, [*starts[1:], file.size]))


def tar_samples(file: SourceFile, *, start: int = 0, stop: int | None = None, extension: str = "") -> Iterator[Sample]:
    """The samples whose first member starts in the bytes given, with what the member ``extension`` of each holds.

    Raises:
        InputError: the archive is damaged or cut off, or a sample has two members of one extension.
    """
    check_unchanged(file)
    sample: Sample | None = None
    for member, stream in _members(file, start):
        key, suffix = _split_name(member.name)
        if not suffix or (key.startswith("__") and member.name.endswith("__")):
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            if stop is not None and member.start >= stop:
                return
            sample = Sample(key, member.start)
        if suffix in sample.fields:
            raise InputError(f"{file.name}: two members of sample {key!r} are named .{suffix}; remove one")
        sample.fields.append(suffix)
        if suffix == extension:
            sample.data = _read(file, stream, member.size)
    if sample is not None:
        yield sample


def _split_name(name: str) -> tuple[str, str]:
    """The key of a member and its field, lower case; no field if its file name has no dot, or starts with one."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem else (name, "")


def _open(file: SourceFile) -> BinaryIO:
    try:
        return gzip.open(file.path, "rb") if is_compressed(file) else open(file.path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror}; mend it or choose files with --glob") from None


def _members(file: SourceFile, start: int) -> Iterator[tuple[_Member, BinaryIO]]:
    """Regular files of the archive from ``start`` on, each with the stream placed at its data."""
    position = begun = start
    told: dict[bytes, bytes] = {}  # what extension headers say of the member after them
    with _open(file) as stream:
        try:
            while header := _header(file, stream, position):
                kind, size = header[156:157], _number(header[124:136])
                if kind == _SPARSE:
                    raise InputError(f"{file.name}: the member at byte {position:,} is a sparse file; pack it plainly")
                if kind in _REGULAR:
                    size = int(told.get(b"size", size))
                    yield _Member(told.get(b"path", _plain_name(header)).decode(errors="replace"), begun, size), stream
                elif kind == _PAX:
                    told |= _pax_records(_read(file, stream, size))
                elif kind == _LONG_NAME:
                    told[b"path"] = _read(file, stream, size).rstrip(b"\0")
                elif kind in _EMPTY:
                    size = 0
                position += _BLOCK - (-size // _BLOCK) * _BLOCK
                if kind in _REGULAR + _EMPTY:
                    begun, told = position, {}
        except _CUT_OFF as error:
            raise _damaged(file, error) from None


def _damaged(file: SourceFile, error: Exception) -> InputError:
    return InputError(f"{file.name} is cut off or damaged: {error}; write it again")


def _header(file: SourceFile, stream: BinaryIO, position: int) -> bytes:
    """The header block at ``position``; empty at the archive's end mark."""
    stream.seek(position)
    block = stream.read(_BLOCK)
    if len(block) < _BLOCK:
        raise InputError(
            f"{file.name} is cut off: it ends before byte {position:,} without its end mark; write it again"
        )
    if not block.strip(b"\0"):
        while rest := stream.read(1 << 20):
            if rest.strip(b"\0"):
                raise InputError(
                    f"{file.name} goes on after its end mark at byte {position:,}, where readers stop; "
                    "archives cannot be joined end to end, pack them again"
                )
        return b""
    try:
        is_header = _number(block[148:156]) == sum(block) - sum(block[148:156]) + 8 * ord(" ")
        is_header &= _number(block[124:136]) >= 0
    except ValueError:
        is_header = False
    if not is_header:
        raise InputError(f"{file.name} has no tar header at byte {position:,}: it is damaged, or no tar archive")
    return block


def _read(file: SourceFile, stream: BinaryIO, size: int) -> bytes:
    try:
        data = stream.read(size)
    except _CUT_OFF as error:
        raise _damaged(file, error) from None
    if len(data) < size:
        raise InputError(
            f"{file.name} is cut off: its last member needs {size:,} bytes and has {len(data):,}; write it again"
        )
    return data


def _number(digits: bytes) -> int:
    """A number of a header: octal, or big-endian behind a byte with its highest bit set."""
    if digits[0] & 0x80:
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    return int(digits.strip(b" \0") or b"0", 8)


def _plain_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Records of the form ``length key=value``, each with its newline."""
    records: dict[bytes, bytes] = {}
    while digits := data.partition(b" ")[0]:
        size = int(digits) if digits.isdigit() else 0
        if not len(digits) < size <= len(data):
            raise EOFError("an extended header is not readable")
        key, _, value = data[len(digits) + 1 : size - 1].partition(b"=")
        records[key], data = value, data[size:]
    return records
