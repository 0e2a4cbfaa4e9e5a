"""Checks over ranks before rows move, so that a mistake on one is an error on all and none waits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.collectives import Handle, all_gather, all_reduce, all_to_all
from lengthwise.runtime.sort.order_codes import DTYPES

MESSAGE_BYTES = 512
"""Of an error's text that other ranks are told."""


@dataclass(frozen=True)
class SortPeers:
    """The ranks that sort together, as this one sees them; one alone where torch.distributed was not started."""

    rank: int
    size: int
    group: Handle
    device: torch.device

    def gather(self, row: Tensor) -> Tensor:
        """Gather every rank's ``row`` [k] into [ranks, k]."""
        rows = row.new_empty(self.size, len(row))
        if self.size == 1:
            return rows.copy_(row)
        all_gather(rows.flatten(), row.contiguous(), group=self.group)
        return rows

    def largest(self, values: Tensor) -> Tensor:
        """Maximum over all ranks, in place."""
        if self.size > 1:
            all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first ``send[0]`` rows to rank 0, and so on; ``receive[r]`` come from rank r, in rank order."""
        if self.size == 1:
            return rows
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        all_to_all(_as_bytes(out), _as_bytes(rows.contiguous()), receive=receive, send=send, group=self.group)
        return out

    def raise_together(self, message: str | None) -> None:
        """Raise on every rank if there is a message on some rank.

        Raises:
            InputError: with the rank and the message of the first of them.
        """
        encoded = (message or "").encode()[:MESSAGE_BYTES]
        own_bytes = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        own_bytes[: len(encoded)] = (
            torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else own_bytes[:0]
        )
        for rank, row in enumerate(self.gather(own_bytes.to(self.device)).cpu()):
            text = bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")
            if text:
                raise InputError(text if self.size == 1 else f"rank {rank}: {text}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks, at the end, an ``OSError`` or an ``InputError`` that one of them meets inside."""
        message = None
        try:
            yield
        except (OSError, InputError) as error:
            message = str(error)
        self.raise_together(message)


def peers_of(tensor: Tensor, group: Handle) -> SortPeers:
    """The ranks of ``group``, or all; they talk where ``tensor`` is: Gloo on CPU, NCCL on GPUs."""
    if not dist.is_initialized():
        return SortPeers(0, 1, None, tensor.device)
    return SortPeers(dist.get_rank(group), dist.get_world_size(group), group, tensor.device)


def agree_on_rows(peers: SortPeers, rows: Tensor, key: Tensor | None = None) -> list[int]:
    """Check that rows match on all ranks, and return how many each has. Two collectives.

    Args:
        peers: the ranks.
        rows: [n, D], n as it is on each.
        key: [n], or None on all ranks.

    Raises:
        InputError: on every rank, if on some rank it is no such thing or another dtype or width than on others.
    """
    peers.raise_together(_fault(rows, key))
    key_kind = -1 if key is None else DTYPES.index(key.dtype)
    kind = torch.tensor([DTYPES.index(rows.dtype), rows.shape[1], key_kind, len(rows)], device=rows.device)
    kinds = peers.gather(kind).tolist()
    for rank, other in enumerate(kinds):
        if other[:3] != kinds[0][:3]:
            raise InputError(
                f"rank 0 has {_said(*kinds[0][:3])} and rank {rank} {_said(*other[:3])}; "
                "give every rank rows of one dtype and width, empty ones too"
            )
    return [other[3] for other in kinds]


def _fault(rows: Tensor, key: Tensor | None) -> str | None:
    supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    if rows.ndim != 2 or rows.shape[1] == 0:
        return f"rows of shape {list(rows.shape)} are not [n, D] with D of at least 1; reshape a list to [n, 1]"
    if rows.dtype not in DTYPES:
        return f"rows are {rows.dtype}, which has no order here; known are {supported}"
    if key is None:
        return None
    if key.dtype not in DTYPES:
        return f"the key is {key.dtype}, which has no order here; known are {supported}"
    if key.shape != rows.shape[:1]:
        return f"the key has shape {list(key.shape)} and there are {len(rows):,} rows; give one number a row"
    return None


def _said(dtype: int, width: int, key: int) -> str:
    by = "" if key < 0 else f" by a key of {str(DTYPES[key]).removeprefix('torch.')}"
    return f"[n, {width}] of {str(DTYPES[dtype]).removeprefix('torch.')}{by}"


def _as_bytes(rows: Tensor) -> Tensor:
    """View rows as [n, bytes of a row]: bytes travel whatever the dtype."""
    return (rows if rows.ndim == 2 else rows.unsqueeze(1)).view(torch.uint8)
