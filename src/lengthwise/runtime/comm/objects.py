"""Plain values between ranks as JSON, not as pickles: what comes over the network is data and never code."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.runtime.comm.activity import ACTIVITY, Activity, CollectiveWait
from lengthwise.runtime.comm.collectives import Handle, all_gather
from lengthwise.runtime.comm.world import DistContext

_DIGEST_WORDS = 2
"""64-bit words of a digest of 32 hex digits."""


def gather_same(world: DistContext, digest: str) -> bool:
    """Whether all ranks pass the same digest of 32 hex digits; every rank calls this."""
    words = [int(digest[start : start + 16], 16) - (1 << 63) for start in range(0, 16 * _DIGEST_WORDS, 16)]
    own_words = torch.tensor(words, dtype=torch.int64, device=world.device)
    rows = own_words.new_empty(world.size * _DIGEST_WORDS)
    all_gather(rows, own_words)
    return bool((rows.view(-1, _DIGEST_WORDS) == own_words).all())


def gather_json(world: DistContext, value: Any) -> list[Any]:
    """Gather the values of all ranks, by rank; every rank calls this. Two all-gathers."""
    return gather_values(value, size=world.size, device=world.device)


def broadcast_json(world: DistContext, value: Any, *, source: int = 0) -> Any:
    """Broadcast the value of rank ``source``; every rank calls this. Two broadcasts."""
    return broadcast_value(value, is_source=world.rank == source, source=source, device=world.device)


def gather_values(
    value: Any, *, size: int, device: torch.device, group: Handle = None, activity: Activity = ACTIVITY
) -> list[Any]:
    """:func:`gather_json` over the ``size`` ranks of ``group``."""
    own_bytes = _to_bytes(value).to(device)
    sizes = torch.empty(size, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([len(own_bytes)], device=device), group=group, activity=activity)
    longest = int(sizes.max())
    padded = own_bytes.new_zeros(longest)
    padded[: len(own_bytes)] = own_bytes
    gathered = own_bytes.new_empty(size * longest)
    all_gather(gathered, padded, group=group, activity=activity)
    return [_from_bytes(row[:length]) for row, length in zip(gathered.view(size, longest), sizes.tolist())]


def broadcast_value(
    value: Any,
    *,
    is_source: bool,
    device: torch.device,
    source: int = 0,
    group: Handle = None,
    activity: Activity = ACTIVITY,
) -> Any:
    """:func:`broadcast_json` over the ranks of ``group``, which rank ``source`` of the world is in."""
    own_bytes = _to_bytes(value if is_source else None).to(device)
    size = torch.tensor([len(own_bytes)], device=device)
    with CollectiveWait("broadcast", activity=activity):
        dist.broadcast(size, source, group=group)
    content = own_bytes if is_source else own_bytes.new_empty(int(size))
    with CollectiveWait("broadcast", activity=activity):
        dist.broadcast(content, source, group=group)
    return _from_bytes(content)


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Any:
    return json.loads(bytes(content.cpu().numpy()))
