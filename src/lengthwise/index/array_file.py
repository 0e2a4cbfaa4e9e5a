"""A row of numbers on disk, read by place.

Nothing is mapped into memory: where a mapped file shrinks, the system kills the process that looks at it (SIGBUS). A
read that comes back short, or of a file that has been written to since it was opened, is an error with a sentence.
"""

import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from lengthwise.core.atomic_write import reason, shown
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.read_file import brief, check_regular


class ArrayFile:
    """``count`` numbers of ``dtype`` from byte ``offset`` of a file, which stays open; a pickled one opens it again.

    A file that is replaced by another of the same name goes on to be read as it was.
    """

    def __init__(self, path: Path, *, dtype: np.dtype[Any], count: int, offset: int = 0) -> None:
        self.path, self.dtype, self._count, self._offset = path, dtype, count, offset
        self._open()
        self._mark = self._state()

    @classmethod
    def of_npy(cls, path: Path) -> Self:
        """The one-dimensional array in a .npy file.

        Raises:
            ValueError: it holds none.
        """
        size = check_regular(path, what="an array")
        with path.open("rb") as stream:
            shape, dtype = _read_header(path, stream)
            if len(shape) != 1 or dtype.hasobject:
                raise ValueError(f"{path} holds an array of shape {shape} of {dtype}, not a row of numbers")
            if not 0 <= shape[0] * dtype.itemsize <= size - stream.tell():
                raise ValueError(f"{path} says that it holds {shape[0]:,} numbers, and has {size:,} bytes")
            return cls(path, dtype=dtype, count=shape[0], offset=stream.tell())

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers ``start`` to ``stop``, read-only.

        Raises:
            LengthwiseError: the file is shorter than that, or has been written to since it was opened.
            OSError: it cannot be read.
        """
        size, first = (stop - start) * self.dtype.itemsize, self._offset + start * self.dtype.itemsize
        content = self._read(size, first)
        if self._state() != self._mark or len(content) != size:
            raise LengthwiseError(self._change(len(content), size))
        return np.frombuffer(content, dtype=self.dtype)

    def _read(self, size: int, first: int) -> bytes:
        if not hasattr(os, "pread"):
            with self.path.open("rb") as stream:
                stream.seek(first)
                return stream.read(size)
        parts = []
        while size and (part := os.pread(self._descriptor, size, first)):
            parts.append(part)
            size, first = size - len(part), first + len(part)
        return b"".join(parts)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _change(self, num_read: int, size: int) -> str:
        now, before = self._state()[0], self._mark[0]
        what = f"has {now:,} bytes instead of {before:,}" if now != before else "has been written to"
        if now == before and num_read != size:
            what = f"gave {num_read:,} bytes of {size:,}"
        return (
            f"{shown(self.path)} {what} since it was opened; restore it, and check it with: lengthwise index --verify"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_descriptor", "_close")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
        if self._state() != self._mark:
            raise LengthwiseError(self._change(0, 0))


def _read_header(path: Path, stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"{path} is a .npy file of version {version}")
    try:
        shape, _, dtype = read_header(stream)
    except Exception as error:  # NumPy parses the header, and a damaged one makes it raise almost anything
        raise ValueError(f"{path} has a damaged header ({brief(str(error), 200)[1:-1]})") from None
    return shape, dtype


def load_array(path: Path, *, way_out: str) -> np.ndarray:
    """The array in a .npy file, read whole and read-only.

    Raises:
        InputError: it cannot be read, or holds no array of numbers; the message ends with ``way_out``.
    """
    try:
        file = ArrayFile.of_npy(path)
        array = file.read(0, len(file))
    except (OSError, ValueError) as error:
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{shown(path)} holds no array of numbers ({words}); {way_out}") from None
    array.flags.writeable = False
    return array
