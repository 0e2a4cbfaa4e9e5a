"""Groups of the ranks of one node, and of the ranks of equal place on every node; which ranks are on one."""

import logging
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lengthwise.core.node_exchange import crossings_of, nodes_of
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.groups import GroupRegistry

PURPOSE = "weights"
_log = logging.getLogger("lengthwise")


@dataclass(frozen=True, kw_only=True)
class NodeGroups:
    """The two groups of this rank by which weights cross between nodes once and spread within them."""

    ranks_per_node: int
    across: Group
    """The ranks that have this rank's place on their nodes, modulo the ranks of the last one."""
    within: Group
    """The ranks of this node."""


def node_groups(groups: GroupRegistry, *, rank: int, num_ranks: int, ranks_per_node: int) -> NodeGroups:
    """The groups of ``rank``; all ranks call this, and the groups are there until the run ends."""
    nodes, crossings = nodes_of(num_ranks, ranks_per_node), crossings_of(num_ranks, ranks_per_node)
    groups.keep([(ranks, PURPOSE) for ranks in [*nodes, *crossings]])
    within, across = (next(groups.of(ranks, PURPOSE) for ranks in of if rank in ranks) for of in (nodes, crossings))
    assert within is not None and across is not None, "a rank is in the groups of its node and of its place"
    return NodeGroups(ranks_per_node=ranks_per_node, across=across, within=within)


def agreed_ranks_per_node(device: torch.device) -> int:
    """Ranks that torchrun started on every machine, or on every one but the last, which may have fewer.

    Where others have fewer, the greatest number that divides the ranks of all; 1 where ranks of one machine do not
    follow one another.
    """
    here, place = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if here == dist.get_world_size():
        return here
    sizes = _machine_sizes(gather_rows(torch.tensor([here, place], device=device)).tolist())
    if sizes is None:
        return 1
    is_usual = len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0]
    ranks_per_node = sizes[0] if is_usual else math.gcd(*sizes)
    if not is_usual and dist.get_rank() == 0:
        _log.warning(
            "machines have %s ranks, in this order; plans take them as nodes of %d. Let the one with the fewest come "
            "last (its --node-rank)", ", ".join(map(str, sizes)), ranks_per_node,
        )  # fmt: skip
    return ranks_per_node


def _machine_sizes(started: list[list[int]]) -> list[int] | None:
    """Ranks of each machine, from their number and this rank's place there [ranks, 2]; None if ranks do not follow."""
    sizes: list[int] = []
    while sum(sizes) < len(started):
        first = sum(sizes)
        size = started[first][0]
        if size < 1 or started[first : first + size] != [[size, place] for place in range(size)]:
            return None
        sizes.append(size)
    return sizes
