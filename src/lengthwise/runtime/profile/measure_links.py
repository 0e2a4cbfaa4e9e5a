"""Measure the links between ranks, and to their hosts: seconds to move next to nothing, and bytes per second."""

import time
from statistics import median

import torch

from lengthwise.core.cost import LinkSpeed, LinkSpeeds
from lengthwise.core.node_exchange import crossings_of, nodes_of
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import DistContext

NUM_BYTES = 1 << 24
"""Bytes that each rank contributes to a gather whose rate is measured."""
REPEATS = 5


def measure_links(world: DistContext) -> LinkSpeeds | None:
    """Time gathers among the ranks of each node and of different nodes, and copies of GPUs to and from their hosts.

    All ranks send at once, so that every port is as busy as in training. Every rank calls this. None where a CPU is
    alone.
    """
    per_node = world.ranks_per_node or world.size
    nodes, crossings = nodes_of(world.size, per_node), crossings_of(world.size, per_node)
    within = _speed(world, nodes) if per_node > 1 else None
    across = _speed(world, crossings) if len(nodes) > 1 else None
    host = host_speed(world)
    return LinkSpeeds(within=within, across=across, host=host) if within or across or host else None


def _speed(world: DistContext, groups: list[tuple[int, ...]]) -> LinkSpeed:
    """Seconds of a call in this rank's group and the rate at which it sends, those of the slowest rank."""
    world.groups.prepare([(ranks, "") for ranks in groups])
    group = next(group for ranks in groups if (group := world.groups.of(ranks)) is not None)
    call_s, moving_s = (_gather_s(world, group, num_bytes) for num_bytes in (1, NUM_BYTES))
    sent_bytes = (max(map(len, groups)) - 1) * NUM_BYTES  # the largest group, which takes longest
    return LinkSpeed(call_s=call_s, bytes_per_s=sent_bytes / max(moving_s - call_s, 0.01 * moving_s))


def host_speed(world: DistContext) -> LinkSpeed | None:
    """Seconds to start a copy and the rate of large ones, out and back at a time as offload has them, of all ranks at
    once, since those of a node share links; None of CPUs, whose memory is the host's. Every rank calls this.
    """
    if world.device.type != "cuda":
        return None
    start_s, moving_s = (_copy_s(world, num_bytes) for num_bytes in (1, NUM_BYTES))
    return LinkSpeed(call_s=start_s, bytes_per_s=NUM_BYTES / max(moving_s - start_s, 0.01 * moving_s))


def _copy_s(world: DistContext, num_bytes: int) -> float:
    """Median seconds of a copy of ``num_bytes`` to the host beside one back; the most of any rank."""
    on_host = torch.zeros(2, num_bytes, dtype=torch.uint8, pin_memory=True)
    on_device, times_s = torch.zeros(2, num_bytes, dtype=torch.uint8, device=world.device), []
    back = torch.cuda.Stream(world.device)
    for _ in range(1 + REPEATS):
        gather_rows(torch.zeros(1, device=world.device))
        world.synchronize()
        start_s = time.perf_counter()
        on_host[0].copy_(on_device[0], non_blocking=True)
        with torch.cuda.stream(back):
            on_device[1].copy_(on_host[1], non_blocking=True)
        world.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return _slowest_s(world, times_s)


def _gather_s(world: DistContext, group: Group, num_bytes: int) -> float:
    """Median seconds of a gather to which each rank contributes ``num_bytes``; the most of any rank."""
    x, times_s = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device), []
    for _ in range(1 + REPEATS):
        gather_rows(torch.zeros(1, device=world.device))
        world.synchronize()
        start_s = time.perf_counter()
        group.gather(x, (num_bytes,) * group.size).wait()
        world.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return _slowest_s(world, times_s)


def _slowest_s(world: DistContext, times_s: list[float]) -> float:
    """The median of all but the first, which is slow of anything; the most of any rank."""
    slowest = torch.tensor([median(times_s[1:])], dtype=torch.float64, device=world.device)
    return float(gather_rows(slowest).max())
