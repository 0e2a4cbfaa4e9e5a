"""Groups of the ranks of one node, and of the ranks of equal place on every node."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lengthwise.runtime.comm.collectives import all_reduce
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.groups import GroupRegistry

PURPOSE = "weights"


@dataclass(frozen=True, kw_only=True)
class NodeGroups:
    """The two groups of this rank by which weights cross between nodes once and spread within them."""

    ranks_per_node: int
    across: Group
    """The ranks that have this rank's place on their nodes."""
    within: Group
    """The ranks of this node."""


def node_groups(groups: GroupRegistry, *, rank: int, num_ranks: int, ranks_per_node: int) -> NodeGroups:
    """The groups of ``rank``; all ranks call this, and the groups are there until the run ends."""
    node, place = divmod(rank, ranks_per_node)
    nodes = [tuple(range(first, first + ranks_per_node)) for first in range(0, num_ranks, ranks_per_node)]
    places = [tuple(range(first, num_ranks, ranks_per_node)) for first in range(ranks_per_node)]
    groups.keep([(ranks, PURPOSE) for ranks in [*nodes, *places]])
    within, across = groups.of(nodes[node], PURPOSE), groups.of(places[place], PURPOSE)
    assert within is not None and across is not None, "a rank is in the groups of its node and of its place"
    return NodeGroups(ranks_per_node=ranks_per_node, across=across, within=within)


def agreed_ranks_per_node(device: torch.device) -> int:
    """Ranks that torchrun started on every machine; all of them where it started more on some than on others."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    here, place = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if here == num_ranks:
        return num_ranks
    is_usual = num_ranks % here == 0 and rank % here == place
    largest = torch.tensor([here, -here if is_usual else 0], device=device)
    all_reduce(largest, dist.ReduceOp.MAX)
    return here if largest.tolist() == [here, -here] else num_ranks
