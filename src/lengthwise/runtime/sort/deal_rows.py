"""Dealing sorted rows out, so that every rank gets easy and hard ones alike, and writing them to one file."""

import io
import os
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.collectives import Handle
from lengthwise.runtime.sort.check_rows import agree_on_rows, peers_of
from lengthwise.runtime.sort.local import with_plain_strides

WRITTEN_BYTES = 1 << 26
"""At a time: what is on a GPU comes to the CPU in such pieces."""


def deal(block: Tensor, *, group: Handle = None) -> Tensor:
    """Deal rows round-robin: of all ranks' rows end to end, rows rank, rank + p, ...: [m, D]. One all-to-all.

    After ``sort_rows``, any p rows that follow one another in the order are on p ranks, and every rank's rows are in
    order: the post's "interleaved" assignment.

    Args:
        block: [n, D] this rank's rows; n as it is on each.
        group: the p ranks; None: all.

    Raises:
        InputError: on every rank, as ``sort_rows`` does.
    """
    peers = peers_of(block, group)
    block = with_plain_strides(block)
    counts = agree_on_rows(peers, block)
    if peers.size == 1:
        return block.clone()
    starts = [0, *accumulate(counts)]
    places = [range(starts[source], starts[source + 1]) for source in range(peers.size)]
    send = [_dealt(places[peers.rank], to, peers.size) for to in range(peers.size)]
    receive = [len(_dealt(rank_places, peers.rank, peers.size)) for rank_places in places]
    rows = torch.cat([block[taken.start :: peers.size] for taken in send])
    return peers.all_to_all(rows, [len(taken) for taken in send], receive)


def write_ordered(block: Tensor, path: str | Path, *, flat: bool = False, group: Handle = None) -> None:
    """Write all ranks' rows, end to end, as one ``.npy`` file that all ranks see; each writes its own rows.

    The file is there when all ranks have written all of it to the disk, and not before.

    Args:
        block: [n, D] this rank's rows; n as it is on each.
        path: of the file; one that is there is replaced.
        flat: the file is [N] instead of [N, 1].
        group: the ranks; None: all.

    Raises:
        InputError: on every rank, as ``sort_rows`` does, or because a rank could not write. No part of the file stays.
    """
    peers = peers_of(block, group)
    counts = agree_on_rows(peers, block)
    if flat and block.shape[1] != 1:
        raise InputError(f"rows of {block.shape[1]} numbers cannot be written flat; leave flat out")
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    first = sum(counts[: peers.rank])
    try:
        with peers.together():
            dtype = _numpy_dtype(block)
            header = _header((sum(counts), *block.shape[1 + flat :]), dtype)
            if peers.rank == 0:
                with partial.open("wb") as file:
                    file.write(header)
                    file.truncate(len(header) + sum(counts) * block.shape[1] * dtype.itemsize)
        with peers.together(), partial.open("r+b") as file:
            file.seek(len(header) + first * block.shape[1] * dtype.itemsize)
            _write(file, block.detach())
            file.flush()
            os.fsync(file.fileno())
        with peers.together():
            if peers.rank == 0:
                partial.replace(path)
                _settle(path.parent)
    finally:
        if peers.rank == 0:
            with suppress(OSError):
                partial.unlink()


def _dealt(places: range, to: int, num_ranks: int) -> range:
    """Rows that a rank, whose rows have these places in the whole order, sends to rank ``to``."""
    return range((to - places.start) % num_ranks, len(places), num_ranks)


def _numpy_dtype(block: Tensor) -> np.dtype:
    if block.dtype == torch.bfloat16:
        raise InputError("NumPy files have no bfloat16; write block.float(), which loses nothing")
    return block[:0].cpu().numpy().dtype


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    file = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def _write(file: BinaryIO, block: Tensor) -> None:
    at_once = max(1, WRITTEN_BYTES // (block.shape[1] * block.element_size()))
    for piece in block.split(at_once) if len(block) else ():
        file.write(piece.cpu().contiguous().numpy().data)


def _settle(folder: Path) -> None:
    """Put the names in a folder on the disk, as ``fsync`` does a file's contents."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
