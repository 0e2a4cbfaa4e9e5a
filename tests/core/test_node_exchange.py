"""Over several nodes, every number that a node needs comes to it once, and every rank gets what it computes with."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.layout import Layout, fully_sharded
from lengthwise.core.node_exchange import hops_of

NODES = [(3, 3), (2, 1), (4, 2), (6, 2), (8, 4), (3, 2), (5, 3), (7, 4), (11, 4), (9, 8)]
"""Ranks in all and on a node; the last node has what remains."""


@st.composite
def cases(draw):
    """Nodes, ranks per node, an owner of every element, and the elements that each rank computes with."""
    num_ranks, per_node = draw(st.sampled_from(NODES))
    size = draw(st.integers(1, 30))
    computed = []
    for _ in range(num_ranks):
        ends = draw(st.lists(st.integers(0, size), unique=True, max_size=6).map(sorted))
        computed.append(tuple(zip(ends[::2], ends[1::2])))
    return per_node, fully_sharded(size, num_ranks), Layout(num_elements=size, intervals=tuple(computed))


@settings(deadline=None)
@given(cases())
def test_the_hops_bring_every_rank_what_it_computes_with_and_nothing_twice_to_a_node(case):
    per_node, owned, computed = case
    hops = [hops_of(rank, owned, computed, ranks_per_node=per_node) for rank in range(owned.num_ranks)]
    held = [elements(intervals) for intervals in owned.intervals]
    for number in range(len(hops[0])):
        crossed, received = set(), [set() for _ in held]
        for rank, hop in enumerate(h[number] for h in hops):
            assert held[rank] == elements(hop.source) and rank in hop.ranks
            assert all(hops[other][number].ranks == hop.ranks for other in hop.ranks)
            for move in (m for m in hop.moves if m.target == rank):
                assert move in hops[move.source][number].moves, "the other side knows of it"
                moved = elements([(move.start, move.end)])
                assert moved <= held[move.source] and not moved & received[rank]
                received[rank] |= moved
                if len(hops[0]) > 1 and move.source // per_node != rank // per_node:
                    assert number == 0, "the second hop stays within the node"
                    assert not {(rank // per_node, element) for element in moved} & crossed
                    crossed |= {(rank // per_node, element) for element in moved}
        held = received
        assert all(elements(h[number].target) == held[rank] for rank, h in enumerate(hops))
    assert held == [elements(intervals) for intervals in computed.intervals]


def elements(intervals):
    return {element for start, end in intervals for element in range(start, end)}
