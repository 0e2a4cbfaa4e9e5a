"""The collectives and messages of a rank, in the order in which it issues them."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lengthwise.runtime.dryrun.device_memory import bytes_of

_KINDS = {
    "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce", "broadcast_": "broadcast", "reduce_": "reduce", "send": "send", "recv_": "receive",
    "barrier": "barrier", "allgather_": "all_gather", "reduce_scatter_": "reduce_scatter",
}  # fmt: skip
MESSAGES = ("send", "receive")


@dataclass(frozen=True, kw_only=True)
class IssuedCollective:
    """One collective, or one message, as one rank issues it."""

    operation: str
    """What the rank was doing, such as ``forward 0``."""
    kind: str
    ranks: tuple[int, ...]
    """The group; of a message its sender and its receiver."""
    num_bytes: int
    """Of the larger of what goes in and what comes out."""
    sent_bytes: float
    """Bytes that this rank sends, as a ring algorithm sends them."""


def issued(name: str, args: tuple[Any, ...], operation: str, rank: int) -> IssuedCollective:
    """The collective that a call of torch's operator ``name`` (without its namespace) issues."""
    kind = _KINDS.get(name, name)
    group = next((group for arg in args if (group := process_group(arg)) is not None), None)
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    tensors = [tensor for arg in args for tensor in (arg if isinstance(arg, list | tuple) else [arg])]
    sizes = [bytes_of(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    num_bytes = max(sizes, default=0)
    if kind in MESSAGES:
        peer = ranks[args[2]]
        ranks = (rank, peer) if kind == "send" else (peer, rank)
    return IssuedCollective(
        operation=operation,
        kind=kind,
        ranks=ranks,
        num_bytes=num_bytes,
        sent_bytes=_sent(kind, args, ranks, rank, num_bytes),
    )


def _sent(kind: str, args: tuple[Any, ...], ranks: tuple[int, ...], rank: int, num_bytes: int) -> float:
    if kind in MESSAGES:
        return num_bytes if kind == "send" else 0
    if kind == "all_to_all":  # rows that come, rows that go
        x, splits = args[1], args[4]
        staying = splits[ranks.index(rank)] if splits else len(x) // len(ranks)
        return bytes_of(x) * (1 - staying / len(x)) if len(x) else 0
    share = num_bytes * (len(ranks) - 1) / len(ranks) if ranks else 0
    return 2 * share if kind == "all_reduce" else share


def process_group(arg: Any) -> dist.ProcessGroup | None:
    """The process group that an argument is, if it is one."""
    if isinstance(arg, dist.ProcessGroup):
        return arg
    try:
        return dist.ProcessGroup.unbox(arg)
    except (RuntimeError, TypeError, AttributeError):
        return None
