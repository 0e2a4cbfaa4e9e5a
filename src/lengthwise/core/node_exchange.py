"""The hops by which weights go from their owners to the ranks that compute with them; gradients go back in reverse.

Within one node: a single hop. Over several nodes of m ranks: what a node needs crosses to it once, however many of its
ranks compute with it. It lands on the rank that has the owner's place among the m of its node, so that all ports of a
node receive alike and ranks of equal place talk; a second hop spreads it within the node.
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

    ``ranks_per_node`` divides the number of ranks.

    Raises:
        InputError: as :func:`lengthwise.core.layout.transfers`.
    """
    check_movable(owned, computed)
    num_ranks = owned.num_ranks
    if ranks_per_node == num_ranks:
        every_rank = tuple(range(num_ranks))
        return (_hop(rank, every_rank, owned, computed),)
    node, place = divmod(rank, ranks_per_node)
    landing = landing_layout(owned, computed, ranks_per_node=ranks_per_node)
    across = tuple(range(place, num_ranks, ranks_per_node))
    within = tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node))
    return _hop(rank, across, owned, landing), _hop(rank, within, landing, computed)


def landing_layout(owned: Layout, computed: Layout, *, ranks_per_node: int) -> Layout:
    """What each rank receives from other nodes, or owns itself, on behalf of its node: nothing twice in a node."""
    starts = [start for start, _, _ in owned.owners]
    landed: list[list[Interval]] = [[] for _ in range(owned.num_ranks)]
    for first in range(0, owned.num_ranks, ranks_per_node):
        needed = _union(computed.intervals[first : first + ranks_per_node])
        for start, end, owner in overlaps_in(needed, owned.owners, starts):
            landed[first + owner % ranks_per_node].append((start, end))
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
