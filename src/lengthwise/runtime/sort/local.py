"""Sorting on one device: NumPy's sorts on CPU, where they are many times faster than torch's; torch's on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lengthwise.runtime.sort.row_words import Word, blocks

_WIDE = {8: torch.int64, 16: torch.complex128}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def sort_integers(words: Tensor) -> None:
    """Sort integers in place."""
    if words.device.type == "cpu":
        words.numpy().sort()
    else:
        words.copy_(words.sort().values)


def order_of(words: Sequence[Word], rows: Tensor) -> Tensor:
    """Places of ``rows`` [n, D] in sorted order, equal rows as they come. int32 where that holds them.

    In one sort of integers where a row's word and its place fit in 64 bits together.
    """
    num_rows = len(rows)
    dtype = torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64
    place_bits = num_rows.bit_length()
    if len(words) == 1 and words[0].num_bits + place_bits <= 64:
        both = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
        for block in blocks(num_rows):
            places = torch.arange(block.start, block.stop, device=rows.device)
            both[block] = (words[0].encode(rows[block]).to(torch.int64) << place_bits) | places
        sort_integers(both)
        return both.bitwise_and_((1 << place_bits) - 1).to(dtype)
    order: Tensor | None = None
    for word in reversed(words):
        keys = word.encode(rows)
        keys = keys if order is None else keys.index_select(0, order)
        step = _stable_order(keys).to(dtype)
        order = step if order is None else order.index_select(0, step)
    assert order is not None
    return order


def take(rows: Tensor, places: Tensor, out: Tensor | None = None) -> Tensor:
    """``rows[places]``; in ``out``, if given. A row of a machine's word or two moves as one number."""
    row_bytes = rows.element_size() * rows.shape[1:].numel()
    wide = _WIDE.get(row_bytes) if rows.is_contiguous() and rows.data_ptr() % row_bytes == 0 else None
    plain = wide or _SIGNED.get(rows.dtype, rows.dtype)  # torch gathers no unsigned numbers but bytes
    if out is None:
        out = rows.new_empty(len(places), *rows.shape[1:])
    source, target = (x.view(plain).view(-1) if wide else x.view(plain) for x in (rows, out))
    torch.index_select(source, 0, places, out=target)
    return out


def with_plain_strides(x: Tensor) -> Tensor:
    """``x``, or a copy where torch calls it contiguous and yet cannot view its bytes as another dtype.

    Arrays of NumPy without rows have strides of 0, and a dimension of one row or column may have any stride.
    """
    if not x.is_contiguous() or list(x.stride()) == [x.shape[dim + 1 :].numel() for dim in range(x.ndim)]:
        return x
    return x.new_empty(x.shape).copy_(x)


def _stable_order(keys: Tensor) -> Tensor:
    if keys.device.type == "cpu":
        return torch.from_numpy(keys.numpy().argsort(kind="stable"))
    return keys.sort(stable=True).indices
