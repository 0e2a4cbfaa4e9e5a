"""Megatron's indexed data sets: ``.bin`` holds the token ids end to end, ``.idx`` where each document is in it."""

import struct
from dataclasses import dataclass

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.index.source_file import SourceFile, check_unchanged

_MAGIC, _OLD_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float64", 7: "float32", 8: "<u2"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Megatron:
    """An opened pair of files. S stored sequences make up D documents."""

    index: SourceFile
    data: SourceFile
    dtype: np.dtype[np.generic]
    sizes: np.ndarray
    """[S] int32, tokens of each stored sequence."""
    pointers: np.ndarray
    """[S] int64, byte at which it starts."""
    bounds: np.ndarray
    """[D + 1] int64, stored sequences before each document."""

    @property
    def num_documents(self) -> int:
        """Documents in the index."""
        return len(self.bounds) - 1


def open_megatron(index: SourceFile, data: SourceFile) -> Megatron:
    """The pair of files, memory-mapped; the header is checked, what it counts is not."""
    check_unchanged(index)
    check_unchanged(data)
    if index.size < _HEADER.size:
        raise InputError(f"{index.name} is no Megatron index: {index.size} bytes, its header alone has {_HEADER.size}")
    raw = np.memmap(index.path, mode="r", dtype=np.uint8)
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic.startswith(_OLD_MAGIC):
        raise InputError(f"{index.name} is an index of the old TNTIDX format; convert the data set to mmap (MMIDIDX)")
    if magic != _MAGIC:
        raise InputError(f"{index.name} is no Megatron index: it does not start with MMIDIDX")
    if version != 1:
        raise InputError(f"{index.name} has version {version} of Megatron's index; version 1 can be read")
    if code not in _DTYPES or np.dtype(_DTYPES[code]).kind == "f":
        type_words = f"type code {code} ({_DTYPES[code]})" if code in _DTYPES else f"unknown type code {code}"
        raise InputError(f"{index.name} holds {type_words}; token ids are integers (codes 1 to 5 and 8)")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if index.size == expected + num_sequences and num_sequences:
        raise InputError(f"{index.name} gives every sequence a mode (multimodal data), which is not read here")
    if index.size != expected:
        raise InputError(
            f"{index.name} has {index.size:,} bytes, but {num_sequences:,} sequences and {num_bounds:,} document "
            f"bounds take {expected:,}; it is damaged, copy it again"
        )
    start = _HEADER.size
    parts = np.split(raw, [start, start + 4 * num_sequences, start + 12 * num_sequences])[1:]
    sizes, pointers, bounds = (part.view(kind) for part, kind in zip(parts, ("<i4", "<i8", "<i8")))
    return Megatron(
        index=index, data=data, dtype=np.dtype(_DTYPES[code]), sizes=sizes, pointers=pointers, bounds=bounds
    )


def megatron_slices(index: SourceFile, data: SourceFile, unit_bytes: int) -> list[tuple[int, int]]:
    """First and last document of slices of about ``unit_bytes``, once all counts of the index are checked."""
    opened = open_megatron(index, data)
    ends = _check(opened)
    starts = np.concatenate([[0], ends])[opened.bounds]  # byte at which each document starts, and the end
    slices, start = [], 0
    while start < opened.num_documents:
        stop = int(np.searchsorted(starts, starts[start] + unit_bytes))
        stop = min(max(stop, start + 1), opened.num_documents)
        slices.append((start, stop))
        start = stop
    return slices


def _check(opened: Megatron) -> np.ndarray:
    """[S] byte at which each stored sequence ends, if sizes, pointers, documents and the data file agree."""
    name, sizes, bounds = opened.index.name, opened.sizes, opened.bounds
    if len(sizes) and int(sizes.min()) < 0:
        where = int(np.argmin(sizes))
        raise InputError(f"{name}: stored sequence {where} has {int(sizes[where])} tokens; the index is damaged")
    ends = np.cumsum(sizes, dtype=np.int64) * opened.dtype.itemsize
    is_wrong = opened.pointers != np.concatenate([[0], ends[:-1]])[: len(sizes)]
    if is_wrong.any():
        where = int(np.argmax(is_wrong))
        due = int(ends[where - 1]) if where else 0
        raise InputError(
            f"{name}: stored sequence {where} starts at byte {int(opened.pointers[where]):,} of {opened.data.name}, "
            f"but those before it end at {due:,}; the index is damaged"
        )
    num_bytes = int(ends[-1]) if len(ends) else 0
    if opened.data.size != num_bytes:
        raise InputError(
            f"{opened.data.name} has {opened.data.size:,} bytes, but {name} counts {num_bytes:,} "
            f"({num_bytes // opened.dtype.itemsize:,} tokens of {opened.dtype.itemsize} bytes); "
            "one of the two is damaged or of another data set"
        )
    last = int(bounds[-1]) if len(bounds) else 0
    if not len(bounds) or bounds[0] != 0 or last != len(sizes) or (bounds[1:] < bounds[:-1]).any():
        raise InputError(
            f"{name}: its documents should go from stored sequence 0 to {len(sizes):,} in ascending order, not "
            f"{'nowhere' if not len(bounds) else f'from {int(bounds[0]):,} to {last:,}'}; the index is damaged"
        )
    return ends


def megatron_tokens(opened: Megatron, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of documents ``start`` to ``stop`` end to end (a view of the file), and the number of each."""
    bounds = opened.bounds[start : stop + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    tokens_before = np.concatenate([[0], np.cumsum(opened.sizes[first:last], dtype=np.int64)])
    lengths = np.diff(tokens_before[bounds - first])
    if not tokens_before[-1]:
        return np.empty(0, dtype=opened.dtype), lengths
    count = int(tokens_before[-1])
    flat = np.memmap(opened.data.path, mode="r", dtype=opened.dtype, offset=int(opened.pointers[first]), shape=(count,))
    return flat, lengths
