"""Files that are unpacked while they are read, from their start to their end: gzip and zstd."""

import gzip
import io
import sys
import zlib
from typing import BinaryIO

from lengthwise.core.errors import InputError, LengthwiseError, first_line, missing_package
from lengthwise.index.document_limits import Limits
from lengthwise.index.source_file import SourceFile, WorkUnit, open_source

SUFFIXES = (".gz", ".zst")
"""Ends of names after which a file is unpacked; what is before them says its format."""
CUT_OFF = (EOFError, zlib.error, gzip.BadGzipFile)


def is_compressed(file: SourceFile) -> bool:
    """Whether the file can only be read from its start."""
    return file.name.lower().endswith((*SUFFIXES, ".tgz"))


def end_of(unit: WorkUnit) -> int:
    """The byte at which the unit ends; of a compressed file, which is one unit, no byte is."""
    return sys.maxsize if is_compressed(unit.files[0]) else unit.stop


def check_unpacked(file: SourceFile, num_bytes: int, limits: Limits) -> None:
    """Raise ``InputError`` if a compressed file unpacks to more than ``limits`` allow."""
    if is_compressed(file) and num_bytes > (max_bytes := limits.unpacked(file.size)):
        raise InputError(
            f"{file.name} ({file.size:,} bytes) unpacks to {num_bytes:,} bytes or more; {max_bytes:,} are allowed, "
            f"{limits.ratio:,} times its size: if it is sound, raise --max-ratio or unpack it first"
        )


def damaged(file: SourceFile, error: Exception) -> InputError:
    """The error of a file whose bytes cannot be unpacked."""
    return InputError(f"{file.name} is cut off or damaged: {first_line(error)}; write it again")


def open_unpacked(file: SourceFile, limits: Limits) -> BinaryIO:
    """The file, opened for reading, unpacked where its name says that it is compressed.

    Reading it raises ``InputError`` where it is damaged or unpacks to more than ``limits`` allow.
    """
    opened = open_source(file)
    if not is_compressed(file):
        return opened
    if file.name.lower().endswith(".zst"):
        try:
            import pyarrow
        except ImportError:
            raise missing_package("reading zstd", "pyarrow") from None
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(opened, mode="r"), "zstd")
    else:
        stream = gzip.GzipFile(fileobj=opened)
    return io.BufferedReader(_Unpacked(file, opened, stream, limits))


class _Unpacked(io.RawIOBase):
    """Counts what is unpacked, and raises one error for whatever is wrong with a file."""

    def __init__(self, file: SourceFile, opened: BinaryIO, stream: BinaryIO, limits: Limits) -> None:
        self._file, self._opened, self._stream, self._limits = file, opened, stream, limits
        self._num_bytes = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fill ``buffer`` with what comes next."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        try:
            data = self._stream.read(len(view))
        except LengthwiseError:
            raise
        except (*CUT_OFF, OSError) as error:
            raise damaged(self._file, error) from None
        view[: len(data)] = data
        self._num_bytes += len(data)
        check_unpacked(self._file, self._num_bytes, self._limits)
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
            self._opened.close()
        super().close()
