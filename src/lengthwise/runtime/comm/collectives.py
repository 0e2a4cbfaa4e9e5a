"""The collectives of a step, under one name on every torch this project supports."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.runtime.comm.activity import ACTIVITY, Activity, CollectiveWait

Handle = dist.ProcessGroup | None
"""None: all ranks."""

# torch 2.13 renamed these two and warns at every call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    whole: Tensor, shard: Tensor, *, group: Handle = None, async_op: bool = False, activity: Activity = ACTIVITY
) -> Any:
    """Fill ``whole`` with every rank's equally long ``shard``, in rank order; a ``Work`` if ``async_op``."""
    with CollectiveWait("all-gather", activity=activity):
        return _all_gather(whole, shard, group=group, async_op=async_op)


def reduce_scatter(shard: Tensor, whole: Tensor, *, group: Handle = None, async_op: bool = False) -> Any:
    """Sum ``whole`` over the ranks and keep this rank's part of it in ``shard``; a ``Work`` if ``async_op``."""
    with CollectiveWait("reduce-scatter"):
        return _reduce_scatter(shard, whole, group=group, async_op=async_op)


def all_to_all(
    out: Tensor, x: Tensor, *, receive: Sequence[int], send: Sequence[int], group: Handle = None, async_op: bool = False
) -> Any:
    """Send the first ``send[0]`` of ``x`` to rank 0, and so on; ``receive[r]`` come from rank r. May be async."""
    with CollectiveWait("all-to-all"):
        return dist.all_to_all_single(out, x, list(receive), list(send), group=group, async_op=async_op)


def all_reduce(values: Tensor, operation: Any = dist.ReduceOp.SUM, *, group: Handle = None) -> Tensor:
    """Sum ``values`` (or reduce them by another operation) over the ranks, in place."""
    with CollectiveWait("all-reduce"):
        dist.all_reduce(values, operation, group=group)
    return values


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum ``values`` over all ranks, in place."""
    return all_reduce(values)


def gather_rows(row: Tensor) -> Tensor:
    """Gather every rank's ``row`` [n] into [ranks, n]."""
    rows = torch.empty(dist.get_world_size() * len(row), dtype=row.dtype, device=row.device)
    all_gather(rows, row)
    return rows.view(-1, len(row))
