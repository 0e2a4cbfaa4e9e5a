"""Sorting ``.npy`` files that do not fit in memory: sorted runs on disk, then one merge of all of them.

A run is as many rows as memory takes. The merge holds a block of every run; of all blocks, what is not after the
smallest of their last rows can be followed by nothing unread, and so it is sorted, written and replaced. Equal rows
keep their order. Files are read and written in pieces, not mapped, so that memory stays what was asked for.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lengthwise.core.errors import InputError

Progress = Callable[[str, int, int], None]
"""What is being done, how many rows of it are done, of how many."""
LEAST_MEMORY_BYTES = 1 << 16
"""With less, runs would be too many to merge in pieces of any use."""
COPIES = 3
"""What memory holds of a row, its key and its place at once, at most, while runs are made and while they are merged."""
_KINDS = "biuf"


@dataclass(frozen=True)
class _Column:
    """Rows of a file, or their numbers where there is no file."""

    path: Path | None
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0
    """Bytes before the rows."""

    @property
    def native(self) -> np.dtype:
        """In this machine's byte order."""
        return self.dtype.newbyteorder("=")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=int))

    def read(self, file: BinaryIO | None, first: int, last: int) -> np.ndarray:
        """Rows ``first`` up to ``last``."""
        if file is None:
            return np.arange(first, last, dtype=self.dtype)
        file.seek(self.start + first * self.row_bytes)
        flat = np.fromfile(file, self.dtype, (last - first) * int(np.prod(self.shape[1:], dtype=int)))
        return flat.reshape(last - first, *self.shape[1:]).astype(self.native, copy=False)


def sort_file(
    source: Path, target: Path, *, memory_bytes: int, key: Path | None = None, on_progress: Progress | None = None
) -> None:
    """Write the rows of ``source`` in order to ``target``; equal ones as they come, NaN last.

    Args:
        source: ``.npy`` of numbers [n] or rows [n, D], sorted by their first column first.
        target: the ``.npy`` file to write, there only when it is whole; a folder beside it holds as many bytes and,
            with a key, the key's, meanwhile.
        memory_bytes: to work in, 64 KiB at least; what Python and NumPy take is not counted.
        key: ``.npy`` [n] of numbers to sort by; None: by the row.
        on_progress: called as it goes on.

    Raises:
        InputError: a file is no such thing, or ``memory_bytes`` or the disk is too small.
    """
    rows = _open(source, most_dims=2)
    if key is None:
        _Sort(rows, None, Path(target), memory_bytes, on_progress).run()
        return
    keys = _open(key, most_dims=1)
    if keys.shape[0] != rows.shape[0]:
        raise InputError(f"{key} has {keys.shape[0]:,} numbers and {source} {rows.shape[0]:,} rows; give one a row")
    _Sort(keys, rows, Path(target), memory_bytes, on_progress).run()


def order_file(metric: Path, target: Path, *, memory_bytes: int, on_progress: Progress | None = None) -> None:
    """Write the places of the numbers in ``metric`` [n], smallest first and equal ones by place, as int64 ``.npy``.

    Arguments and errors are those of ``sort_file``.
    """
    keys = _open(metric, most_dims=1)
    ids = _Column(None, np.dtype(np.int64), keys.shape)
    _Sort(keys, ids, Path(target), memory_bytes, on_progress).run()


@dataclass(frozen=True)
class _Sort:
    """One sort: of ``keys``, which take ``rows`` along and are not kept then."""

    keys: _Column
    rows: _Column | None
    target: Path
    memory_bytes: int
    on_progress: Progress | None

    def run(self) -> None:
        """Runs, merge, and the file in its place."""
        self._check()
        with tempfile.TemporaryDirectory(dir=self.target.parent, prefix=f".{self.target.name}.sorting-") as work:
            folder = Path(work)
            self._write_runs(folder)
            with (folder / "whole.npy").open("wb") as out:
                self._merge(folder, out)
                out.flush()
                os.fsync(out.fileno())
            (folder / "whole.npy").replace(self.target)

    @property
    def _size(self) -> int:
        return self.keys.shape[0]

    @property
    def _kept(self) -> list[_Column]:
        return [self.keys, self.rows] if self.rows else [self.keys]

    @property
    def _fit(self) -> int:
        """Rows that memory takes."""
        held_bytes = sum(column.row_bytes for column in self._kept) + np.dtype(np.int64).itemsize
        return self.memory_bytes // (COPIES * held_bytes)

    def _check(self) -> None:
        needed = self._size * (sum(column.row_bytes for column in self._kept) + self._kept[-1].row_bytes)
        if self.memory_bytes < LEAST_MEMORY_BYTES or self._fit < 1:
            raise InputError(
                f"memory_bytes is {self.memory_bytes:,}; give {LEAST_MEMORY_BYTES:,}, or more for wide rows"
            )
        if not self.target.parent.is_dir():
            raise InputError(f"{self.target.parent} is no folder to write {self.target.name} to; make it first")
        free = shutil.disk_usage(self.target.parent).free
        if free < needed:
            raise InputError(f"sorting to {self.target} takes {needed:,} bytes of disk and {free:,} are free there")

    def _write_runs(self, folder: Path) -> None:
        with ExitStack() as stack:
            sources = [stack.enter_context(column.path.open("rb")) if column.path else None for column in self._kept]
            files = [stack.enter_context((folder / str(place)).open("wb")) for place in range(len(self._kept))]
            for first, last in self._runs():
                keys = self.keys.read(sources[0], first, last)
                if self.rows is None and keys.ndim == 1:
                    _sorted_numbers(keys).tofile(files[0])
                else:
                    order = _order(keys)
                    keys[order].tofile(files[0])
                    del keys
                    if self.rows:
                        self.rows.read(sources[1], first, last)[order].tofile(files[1])
                self._tell("sorting runs", last)

    def _runs(self) -> list[tuple[int, int]]:
        """First row of each, and the one after its last."""
        return [(first, min(first + self._fit, self._size)) for first in range(0, self._size, self._fit)]

    def _merge(self, folder: Path, out: BinaryIO) -> None:
        rows = self._kept[-1]
        described = {"descr": np.lib.format.dtype_to_descr(rows.native), "fortran_order": False, "shape": rows.shape}
        np.lib.format.write_array_header_1_0(out, described)
        columns = [_Column(folder / str(place), column.native, column.shape) for place, column in enumerate(self._kept)]
        bounds = self._runs()
        at_once = max(1, self._fit // max(1, len(bounds)))
        done = 0
        with ExitStack() as stack:
            files = [stack.enter_context((folder / str(place)).open("rb")) for place in range(len(columns))]
            runs = [_Run(columns, files, first, last) for first, last in bounds]
            while runs:
                taken = _take_round(runs, at_once)
                parts = [np.concatenate(pieces) for pieces in zip(*taken)]
                del taken
                order = _order(parts[0])
                parts[-1][order].tofile(out)
                done += len(order)
                self._tell("merging", done)
                runs = [run for run in runs if run.num_left]

    def _tell(self, what: str, done: int) -> None:
        if self.on_progress:
            self.on_progress(what, done, self._size)


class _Run:
    """Sorted rows of the work files, of which the next ones are in memory."""

    def __init__(self, columns: Sequence[_Column], files: Sequence[BinaryIO], first: int, last: int) -> None:
        self._columns, self._files, self._next, self._last = columns, files, first, last
        self._held = [column.read(file, first, first) for column, file in zip(columns, files)]

    @property
    def keys(self) -> np.ndarray:
        """Keys of the rows in memory."""
        return self._held[0]

    @property
    def is_all_held(self) -> bool:
        """Whether nothing is left to read."""
        return self._next == self._last

    @property
    def num_left(self) -> int:
        """Rows, in memory or not."""
        return len(self.keys) + self._last - self._next

    def fill(self, at_once: int) -> None:
        """Have ``at_once`` rows in memory, or all that are left."""
        last = min(self._last, self._next + at_once - len(self.keys))
        if last > self._next:
            read = [column.read(file, self._next, last) for column, file in zip(self._columns, self._files)]
            self._held = [np.concatenate(pair) for pair in zip(self._held, read)]
            self._next = last

    def take(self, count: int) -> list[np.ndarray]:
        """The next ``count`` rows, which are then no longer here."""
        taken = [part[:count] for part in self._held]
        if count:
            self._held = [part[count:].copy() for part in self._held]
        return taken


def _take_round(runs: list[_Run], at_once: int) -> list[list[np.ndarray]]:
    """Take the rows of every run, in their order, that come before all that is not in memory."""
    for run in runs:
        run.fill(at_once)
    open_runs = [place for place, run in enumerate(runs) if not run.is_all_held]
    if not open_runs:
        return [run.take(len(run.keys)) for run in runs]
    lasts = np.stack([runs[place].keys[-1] for place in open_runs])
    smallest = int(_order(lasts)[0])
    cut, owner = lasts[smallest], open_runs[smallest]
    # Rows equal to the cut follow those of earlier runs, all in memory, and precede those of later ones.
    return [run.take(_count(run.keys, cut, equal=place <= owner)) for place, run in enumerate(runs)]


def _count(keys: np.ndarray, cut: np.ndarray, *, equal: bool) -> int:
    """Sorted ``keys`` [m] or [m, D] before ``cut``, those equal to it with them or not."""
    first, last = 0, len(keys)
    for column, value in zip(keys.reshape(len(keys), -1).T, np.atleast_1d(cut)):
        part = column[first:last]
        first, last = first + int(part.searchsorted(value, "left")), first + int(part.searchsorted(value, "right"))
    return last if equal else first


def _order(keys: np.ndarray) -> np.ndarray:
    """Places of ``keys`` [m] or rows [m, D] in stable order."""
    if keys.ndim == 2:
        return np.lexsort(keys.T[::-1]) if keys.shape[1] > 1 else _order(keys[:, 0])
    if keys.dtype.itemsize > 4 or len(keys) > 1 << 32:
        return keys.argsort(kind="stable")
    both = _codes(keys)  # number and place in one integer: sorting these is several times faster
    both <<= 32
    both |= np.arange(len(keys))
    both.sort()
    both &= (1 << 32) - 1
    return both


def _codes(keys: np.ndarray) -> np.ndarray:
    """Numbers of at most 4 bytes as int64 that compare as they do and fit in 32 bits: NaN last, -0.0 as 0.0."""
    if keys.dtype.kind != "f":
        codes = keys.astype(np.int64)
        codes -= (1 << 31) if keys.dtype == np.uint32 else 0
        return codes
    bits: np.ndarray = keys.view(f"i{keys.dtype.itemsize}")
    largest = int(np.iinfo(bits.dtype).max)
    codes = np.where(bits < 0, bits ^ largest, bits)
    codes[keys == 0] = 0
    codes[np.isnan(keys)] = largest
    return codes.astype(np.int64)


def _sorted_numbers(keys: np.ndarray) -> np.ndarray:
    """``keys`` [m] in stable order, by a sort that is not: what compares equal and is not the same is put back."""
    ordered = np.sort(keys)
    if keys.dtype.kind == "f":
        first, last = ordered.searchsorted(0, "left"), ordered.searchsorted(0, "right")
        ordered[first:last] = keys[keys == 0]
        nans = keys[np.isnan(keys)]
        ordered[len(ordered) - len(nans) :] = nans
    return ordered


def _open(path: Path, *, most_dims: int) -> _Column:
    """A ``.npy`` file's rows."""
    try:
        mapped = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no .npy file that can be read: {error}") from None
    if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in _KINDS or mapped.dtype.itemsize > 8:
        raise InputError(f"{path} does not hold numbers that can be sorted; save integers, floats or booleans")
    if not 1 <= mapped.ndim <= most_dims or 0 in mapped.shape[1:]:
        raise InputError(f"{path} has shape {list(mapped.shape)}; save {'[n] or [n, D]' if most_dims == 2 else '[n]'}")
    if not mapped.flags.c_contiguous:
        raise InputError(f"{path} is in Fortran order; save numpy.ascontiguousarray of it")
    start = mapped.offset if isinstance(mapped, np.memmap) else 0
    return _Column(Path(path), mapped.dtype, mapped.shape, start)
