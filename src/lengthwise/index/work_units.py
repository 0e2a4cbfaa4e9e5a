"""Work units: slices of the source that are read, encoded and kept independently of one another and of the workers."""

import warnings
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from lengthwise.core.errors import InputError
from lengthwise.index.readers.arrow import arrow_slices
from lengthwise.index.readers.compressed import is_compressed
from lengthwise.index.readers.megatron import megatron_slices
from lengthwise.index.readers.webdataset import tar_slices
from lengthwise.index.source_file import Format, SourceFile, WorkUnit, check_unchanged, explaining, open_parquet
from lengthwise.index.sources import Sources

_MAX_FILES = 4096


def split_units(sources: Sources, *, unit_bytes: int) -> list[WorkUnit]:
    """The source in order, as units of about ``unit_bytes``; a function of the source alone."""
    if sources.format is Format.TEXT:
        groups = enumerate(_text_groups(sources.files, unit_bytes))
        return [WorkUnit(number=number, format=Format.TEXT, files=files) for number, files in groups]
    width = 2 if sources.format is Format.MEGATRON else 1
    sliced = [sources.files[first : first + width] for first in range(0, len(sources.files), width)]
    slices = ((files, start, stop) for files in sliced for start, stop in _slices(files, sources.format, unit_bytes))
    return [
        WorkUnit(number=number, format=sources.format, files=files, start=start, stop=stop)
        for number, (files, start, stop) in enumerate(slices)
    ]


def _text_groups(files: tuple[SourceFile, ...], unit_bytes: int) -> Iterator[tuple[SourceFile, ...]]:
    group: list[SourceFile] = []
    num_bytes = 0
    for file in files:
        group.append(file)
        num_bytes += max(file.size, 0)
        if num_bytes >= unit_bytes or len(group) == _MAX_FILES:
            yield tuple(group)
            group, num_bytes = [], 0
    if group:
        yield tuple(group)


def _slices(files: tuple[SourceFile, ...], format: Format, unit_bytes: int) -> Iterable[tuple[int, int]]:
    check_unchanged(files[0])
    if format in (Format.JSONL, Format.FASTA) and is_compressed(files[0]):
        return [(0, files[0].size)]
    if format is Format.MEGATRON:
        return megatron_slices(files[0], files[1], unit_bytes)
    by_format: dict[Format, Callable[[SourceFile, int], Iterable[tuple[int, int]]]] = {
        Format.PARQUET: _row_group_slices,
        Format.NPY: _length_slices,
        Format.ARROW: arrow_slices,
        Format.TAR: tar_slices,
        Format.JSON: lambda file, unit_bytes: [(0, file.size)],
        Format.READER: lambda file, unit_bytes: [(0, file.size)],
    }
    return by_format.get(format, _even_slices)(files[0], unit_bytes)


def _even_slices(file: SourceFile, unit_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, max(file.size, 1), unit_bytes):
        yield start, min(start + unit_bytes, file.size)


def _length_slices(file: SourceFile, unit_bytes: int) -> Iterator[tuple[int, int]]:
    lengths = open_lengths(file)
    step = max(1, unit_bytes // lengths.dtype.itemsize)
    for start in range(0, max(len(lengths), 1), step):
        yield start, min(start + step, len(lengths))


def _row_group_slices(file: SourceFile, unit_bytes: int) -> Iterator[tuple[int, int]]:
    metadata = open_parquet(file).metadata
    start, num_bytes = 0, 0
    with explaining(f"{file.name} is damaged", "; write the file again"):
        for group in range(metadata.num_row_groups):
            num_bytes += metadata.row_group(group).total_byte_size
            if num_bytes >= unit_bytes:
                yield start, group + 1
                start, num_bytes = group + 1, 0
        if start < metadata.num_row_groups:
            yield start, metadata.num_row_groups


def open_lengths(file: SourceFile) -> np.ndarray:
    """The memory-mapped row of integers in a .npy file."""
    with explaining(f"{file.name} is not a .npy array of numbers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that overflow, which are refused
        with open(file.path, "rb") as start:
            if start.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:
                raise ValueError("save lengths with np.save, or make an index of texts with `lengthwise index`")
        lengths = np.load(file.path, mmap_mode="r", allow_pickle=False)
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        description = f"{lengths.dtype} of shape {lengths.shape}" if isinstance(lengths, np.ndarray) else "an archive"
        raise InputError(f"{file.name} must hold one row of integers, one length per sequence, not {description}")
    return lengths
