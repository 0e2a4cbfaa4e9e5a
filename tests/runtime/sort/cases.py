"""Rows to sort, what NumPy makes of them, and checks that run on every rank."""

import torch
import torch.distributed as dist

from lengthwise.runtime.sort.order_codes import DTYPES
from lengthwise.runtime.sort.rows import sort_rows

NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 16_777_216.0, -16_777_216.0)


def make_rows(seed, num_rows, width, name, *, kind):
    """``kind``: ``whole`` any bits that the dtype can hold, ``few`` some values again and again, ``special`` floats."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, name)
    if kind == "special" and dtype.is_floating_point:
        chosen = torch.randint(len(SPECIAL), (num_rows, width), generator=generator)
        return torch.tensor(SPECIAL, dtype=torch.float64)[chosen].to(dtype)
    if kind == "whole" and dtype != torch.bool:
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(256, (num_rows, width * size), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)
    return torch.randint(3, (num_rows, width), generator=generator).to(dtype)


def in_order(rows, key=None):
    """The rows as NumPy's stable sort has them."""
    columns = _comparable(rows if key is None else key[:, None])
    order = torch.arange(len(rows))
    for column in reversed(columns.T):
        order = order[torch.from_numpy(column[order.numpy()].argsort(kind="stable"))]
    return rows[order]


def _comparable(columns):
    if columns.dtype == torch.bfloat16:
        columns = columns.float()
    return columns.numpy()


def as_bits(rows):
    """So that NaN equals NaN and -0.0 is not 0.0."""
    return rows.contiguous().view(torch.uint8)


def own_part(whole, sizes):
    """This rank's rows of ``whole``, if ranks have ``sizes``."""
    return whole.split(list(sizes))[dist.get_rank()]


def share_of(whole):
    """What a sort owes this rank: floor or ceil of an even share, and where it begins."""
    share, more = divmod(len(whole), dist.get_world_size())
    rank = dist.get_rank()
    start = rank * share + min(rank, more)
    return whole[start : start + share + (rank < more)]


def check_sorted(whole, sizes, key=None):
    """This rank's share of the exact order, to the bit."""
    mine = own_part(whole, sizes)
    mine_before = mine.clone()
    found = sort_rows(mine, key=None if key is None else own_part(key, sizes))
    wanted = share_of(in_order(whole, key))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(as_bits(found), as_bits(wanted))
    assert torch.equal(as_bits(mine), as_bits(mine_before))


def check_drawn(cases):
    """Several cases (seed, sizes, width, dtype, kind, dtype of the key or None)."""
    for seed, sizes, width, name, kind, key_name in cases:
        whole = make_rows(seed, sum(sizes), width, name, kind=kind)
        key = None if key_name is None else make_rows(seed + 1, sum(sizes), 1, key_name, kind=kind)[:, 0]
        check_sorted(whole, sizes, key)
