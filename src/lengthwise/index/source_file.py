"""One file of a corpus, and a slice of one that is read as a unit."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lengthwise.core.errors import InputError, LengthwiseError, first_line, missing_package


class Format(StrEnum):
    """How a file is read."""

    TEXT = "text"
    JSONL = "jsonl"
    JSON = "json"
    """One array of rows."""
    PARQUET = "parquet"
    NPY = "npy"
    FASTA = "fasta"
    ARROW = "arrow"
    MEGATRON = "megatron"
    TAR = "tar"
    READER = "reader"
    """By a function of the user's or of another package."""


class SourceFile(NamedTuple):
    """One file: where it is, what it is called in the index, and what tells that it changed."""

    path: str
    name: str
    size: int
    """Bytes; -1 when the file cannot be read at all (a broken link)."""
    mtime_ns: int


def source_file(path: Path, name: str) -> SourceFile:
    """The file as it is now; a size of -1 where it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return SourceFile(path=str(path), name=name, size=-1, mtime_ns=0)
    if not stat.S_ISREG(status.st_mode):  # sockets and pipes are no documents
        return SourceFile(path=str(path), name=name, size=-1, mtime_ns=-1)
    return SourceFile(path=str(path), name=name, size=status.st_size, mtime_ns=status.st_mtime_ns)


def open_regular(path: str) -> BinaryIO:
    """The file at ``path``, opened for reading without ever waiting: a pipe or device is an ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return os.fdopen(descriptor, "rb")


def open_source(file: SourceFile) -> BinaryIO:
    """The file, opened for reading; ``InputError`` if it cannot be."""
    try:
        return open_regular(file.path)
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror}; mend it or choose files with --glob") from None


@contextmanager
def explaining(said: str, way_out: str = "") -> Iterator[None]:
    """Whatever a library raises over a damaged file becomes one ``InputError``: ``said``, why, and the way out."""
    try:
        yield
    except LengthwiseError:
        raise
    except Exception as error:
        raise InputError(f"{said}: {first_line(error)}{way_out}") from None


def check_unchanged(file: SourceFile) -> None:
    """Raise ``InputError`` if the file is gone, has another size, or was written to since it was listed."""
    if file.size < 0:
        raise InputError(f"{file.name} cannot be read: {file.path} leads nowhere; mend the link or choose with --glob")
    now = source_file(Path(file.path), file.name)
    if now.size != file.size:
        raise InputError(
            f"{file.name} changed while it was indexed: {file.size:,} bytes before, {max(now.size, 0):,} now; "
            "index again with --restart once nothing writes to it"
        )
    if now.mtime_ns != file.mtime_ns:
        raise InputError(
            f"{file.name} was written to while it was indexed; index again with --restart once nothing writes to it"
        )


@dataclass(frozen=True, kw_only=True)
class WorkUnit:
    """A slice of the source.

    ``start`` and ``stop`` are bytes (jsonl, fasta, arrow, tar), row groups (parquet), rows (npy), documents (megatron).
    JSON arrays are whole files, and so is what a reader of another package gets.
    """

    number: int
    format: Format
    files: tuple[SourceFile, ...]
    """Several whole files for text, else the one that is sliced; for megatron the .idx and its .bin."""
    start: int = 0
    stop: int = 0


def open_parquet(file: SourceFile) -> Any:
    """The Parquet file, opened; its rows are not read yet."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("reading Parquet", "pyarrow") from None
    with explaining(f"{file.name} is not a Parquet file"):
        return pyarrow.parquet.ParquetFile(file.path)
