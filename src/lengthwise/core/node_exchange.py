"""The hops by which weights go from their owners to the ranks that compute with them; gradients go back in reverse.

Within one node: a single hop. Over several nodes of m ranks: what a node needs crosses to it once, however many of its
ranks compute with it. It lands on the rank that has the owner's place among the m of its node, so that all ports of a
node receive alike and ranks of equal place talk; a second hop spreads it within the node. Where the last node has k < m
ranks, places are taken modulo k there, and ranks talk whose places are equal modulo k.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lengthwise.core.layout import Interval, Layout, Transfer, check_movable, moves_of, overlaps_in


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of slices within a group of ranks, as one of them sees it."""

    ranks: tuple[int, ...]
    """The ranks that take part, this one among them; they ascend."""
    source: tuple[Interval, ...]
    """What this rank has before it."""
    target: tuple[Interval, ...]
    """What it has afterwards."""
    moves: tuple[Transfer, ...]
    """The slices that it sends and receives, those that it keeps included."""


def hops_of(rank: int, owned: Layout, computed: Layout, *, ranks_per_node: int) -> tuple[Hop, ...]:
    """The hops that bring ``rank`` from what it owns to what it computes with: one, or two over several nodes.

    The last node has fewer ranks where ``ranks_per_node`` does not divide their number.

    Raises:
        InputError: as :func:`lengthwise.core.layout.transfers`.
    """
    check_movable(owned, computed)
    num_ranks = owned.num_ranks
    if ranks_per_node == num_ranks:
        every_rank = tuple(range(num_ranks))
        return (_hop(rank, every_rank, owned, computed),)
    landing = landing_layout(owned, computed, ranks_per_node=ranks_per_node)
    within = nodes_of(num_ranks, ranks_per_node)[rank // ranks_per_node]
    across = next(ranks for ranks in crossings_of(num_ranks, ranks_per_node) if rank in ranks)
    return _hop(rank, across, owned, landing), _hop(rank, within, landing, computed)


def nodes_of(num_ranks: int, ranks_per_node: int) -> list[tuple[int, ...]]:
    """The ranks of every node; the last one may have fewer."""
    return [
        tuple(range(first, min(first + ranks_per_node, num_ranks))) for first in range(0, num_ranks, ranks_per_node)
    ]


def crossings_of(num_ranks: int, ranks_per_node: int) -> list[tuple[int, ...]]:
    """The groups of ranks that exchange between nodes: those of equal place, modulo the ranks of the last node."""
    fewest = num_ranks % ranks_per_node or ranks_per_node
    return [
        tuple(rank for rank in range(num_ranks) if rank % ranks_per_node % fewest == place) for place in range(fewest)
    ]


def landing_layout(owned: Layout, computed: Layout, *, ranks_per_node: int) -> Layout:
    """What each rank receives from other nodes, or owns itself, on behalf of its node: nothing twice in a node."""
    starts = [start for start, _, _ in owned.owners]
    landed: list[list[Interval]] = [[] for _ in range(owned.num_ranks)]
    for node in nodes_of(owned.num_ranks, ranks_per_node):
        needed = _union(computed.intervals[node[0] : node[-1] + 1])
        for start, end, owner in overlaps_in(needed, owned.owners, starts):
            landed[node[owner % ranks_per_node % len(node)]].append((start, end))
    return Layout(num_elements=owned.num_elements, intervals=tuple(map(tuple, landed)))


def _hop(rank: int, ranks: tuple[int, ...], source: Layout, target: Layout) -> Hop:
    """The hop of ``rank`` within ``ranks``, from what they have to what they need."""
    part_of_source, part_of_target = (
        Layout(num_elements=layout.num_elements, intervals=tuple(layout.intervals[other] for other in ranks))
        for layout in (source, target)
    )
    moves = (
        Transfer(source=ranks[move.source], target=ranks[move.target], start=move.start, end=move.end)
        for move in moves_of(ranks.index(rank), part_of_source, part_of_target)
    )
    return Hop(ranks=ranks, source=source.intervals[rank], target=target.intervals[rank], moves=tuple(moves))


def _union(intervals_of_ranks: Iterable[tuple[Interval, ...]]) -> list[Interval]:
    """Sorted and disjoint intervals of all that some rank has."""
    union: list[Interval] = []
    for start, end in sorted({interval for intervals in intervals_of_ranks for interval in intervals}):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union
