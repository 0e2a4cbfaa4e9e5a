"""Ranks agree on how many of them every machine has."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lengthwise.runtime.comm.nodes import agreed_ranks_per_node
from tests.runtime.train.runs import local_world

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ({rank: (2, rank % 2) for rank in range(4)}, 2),
        ({rank: (4, rank) for rank in range(4)}, 4),
        ({0: (3, 0), 1: (3, 1), 2: (3, 2), 3: (1, 0)}, 3),
        ({0: (1, 0), 1: (1, 0), 2: (2, 0), 3: (2, 1)}, 1),
        ({rank: (2, 1 - rank % 2) for rank in range(4)}, 1),
        ({0: (0, 0), 1: (3, 0), 2: (3, 1), 3: (3, 2)}, 1),
    ],
    ids=["two nodes of two", "one node", "three and one", "one, one and two", "no order", "a machine of none"],
)
def test_ranks_per_node_are_what_machines_have_but_for_the_last(ranks, started, expected):
    assert ranks(4).run(_agree, started) == [expected] * 4


def _agree(started):
    size, place = started[dist.get_rank()]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(place)):
        return agreed_ranks_per_node(CPU)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (2, 2), (2, 0)])
def test_one_node_and_nodes_of_one_rank_have_no_groups(ranks, num_ranks, ranks_per_node):
    assert ranks(num_ranks).run(_nodes, ranks_per_node) == [None] * num_ranks


def _nodes(ranks_per_node):
    return local_world(ranks_per_node).nodes
