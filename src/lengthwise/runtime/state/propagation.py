"""Pull and push: how each unit's weights come from their owners to whoever computes with them, and gradients back.

Owners hold their shares in the optimization layout, ranks compute in a propagation layout. Where every rank computes
with all of a unit, the two ways are an all-gather and a reduce-scatter over all ranks. Else they are all-to-alls of
exactly the slices that :func:`lengthwise.core.node_exchange.hops_of` lists. Within a node that is one; over several
nodes it is one between them, by which every number comes to a node once, and one within each. Gradients are added up
within their node first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.core.layout import Interval, Layout, Transfer, shard_size
from lengthwise.core.node_exchange import hops_of
from lengthwise.runtime.comm.collectives import Handle, all_gather, all_to_all, reduce_scatter
from lengthwise.runtime.comm.group import AsyncResult, Traffic
from lengthwise.runtime.comm.host_memory import RunningSums
from lengthwise.runtime.comm.nodes import NodeGroups
from lengthwise.runtime.comm.side_streams import OnSideStream

Slices = tuple[tuple[slice, ...], ...]
"""For each rank of a group, some slices of a tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceExchange:
    """One hop of a unit's weights: an all-to-all of slices within a group, and its reverse, which adds gradients."""

    group: Handle
    place: int
    """Of this rank in the group."""
    to: Slices
    """For each rank: what it gets of what this rank has before the hop."""
    come: Slices
    """For each rank: what comes from it of what this rank has afterwards."""
    num_source: int
    """Elements that this rank has before."""
    num_target: int
    """Elements that it has afterwards."""

    def forward(self, source: Tensor, target: Tensor) -> AsyncResult:
        """Fill ``target`` from the sources of all ranks."""
        outgoing, direct = _joined(source, self.to), _is_in_order(self.come)
        incoming = target if direct else torch.empty_like(target)
        works = self._exchange(incoming, outgoing, receive=_sizes(self.come), send=_sizes(self.to))

        def make(keep: Tensor = outgoing) -> Tensor:
            if not direct:
                for place, piece in _places(self.come):
                    target[place] = incoming[piece]
            return target

        return AsyncResult(make, works, "pull of weights")

    def reverse(self, gradients: Tensor, total: Tensor, sums: RunningSums) -> AsyncResult:
        """Let ``sums`` add all ranks' ``gradients``, laid out as targets, to ``total``, laid out as the source, rank by
        rank."""
        outgoing = gradients if _is_in_order(self.come) else _joined(gradients, self.come)
        receive = _sizes(self.to)
        incoming = gradients.new_empty(sum(receive))
        works = self._exchange(incoming, outgoing, receive=receive, send=_sizes(self.come))

        def make(keep: Tensor = outgoing) -> Tensor:
            sums.add(total, incoming, _places(self.to))
            return total

        return AsyncResult(make, works, "push of gradients")

    def _exchange(self, incoming: Tensor, outgoing: Tensor, *, receive: list[int], send: list[int]) -> list[dist.Work]:
        """Begin the all-to-all; a rank that is alone on its node copies at once."""
        if len(self.to) == 1:
            incoming.copy_(outgoing)
            return []
        return [all_to_all(incoming, outgoing, receive=receive, send=send, group=self.group, async_op=True)]

    @property
    def num_sent(self) -> tuple[int, int]:
        """Elements that this rank sends to others, forward and in reverse."""
        forward, reverse = _sizes(self.to), _sizes(self.come)
        return sum(forward) - forward[self.place], sum(reverse) - reverse[self.place]


class TwoHops(AsyncResult):
    """An exchange on CPUs whose second hop starts when the first has come.

    The first has to be waited for, so the second starts with :meth:`start` or, at the latest, with :meth:`wait`; all
    ranks must do so in one order.
    """

    def __init__(self, first: AsyncResult, then: Callable[[Tensor], AsyncResult]) -> None:
        self._first, self._then = first, then
        self._second: AsyncResult | None = None

    def start(self) -> "TwoHops":
        """Start the second hop, waiting for the first if need be."""
        if self._second is None:
            self._second = self._then(self._first.wait())
        return self

    def wait(self) -> Tensor:
        """The result of both hops, when it is there."""
        self.start()
        assert self._second is not None
        return self._second.wait()

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        return self._second is not None and self._second.is_done


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitRoute:
    """Route of one unit's weights and gradients between owners and the ranks that compute, as one rank sees it."""

    region: slice
    """Of this rank's flat weights and gradients: what it computes with, in the order of the buffer, then padding."""
    own_share: slice
    """Of this rank's flat master weights: its share of the unit."""
    num_ranks: int
    shard: int
    """Elements of the largest share where all ranks compute with the whole unit; else 0."""
    hops: tuple[SliceExchange, ...]
    """From owners to those who compute; none where ``shard`` is not 0."""
    sent: Traffic

    def pull(self, own_share: Tensor, weights: Tensor) -> AsyncResult:
        """Fill the region of ``weights`` from every owner's share; ``own_share``: this rank's, in the compute dtype.

        On a GPU the current stream waits for the first of two hops.
        """
        region = weights[self.region]
        if self.shard:
            own_share = (
                own_share
                if len(own_share) == self.shard
                else torch.cat([own_share, own_share.new_zeros(self.shard - len(own_share))])
            )
            self.sent.add("pull", (self.num_ranks - 1) * self.shard * own_share.element_size())
            work = all_gather(region, own_share, async_op=True)
            return AsyncResult(lambda keep=own_share: region, [work], "pull of weights")  # type: ignore[misc]
        for hop in self.hops:
            self.sent.add("pull", hop.num_sent[0] * own_share.element_size())
        if len(self.hops) == 1:
            return self.hops[0].forward(own_share, region)
        across, within = self.hops
        landed = own_share.new_empty(across.num_target)
        first = across.forward(own_share, landed)
        if own_share.is_cuda:
            return within.forward(first.wait(), region)
        return TwoHops(first, lambda landed: within.forward(landed, region)).start()

    def push(self, gradients: Tensor, pushed: Tensor, sums: RunningSums) -> AsyncResult:
        """Let ``sums`` add every rank's gradients of our share to its part of ``pushed``, rank by rank.

        On a GPU a side stream makes it, so that however many are queued, buffers of few units are in memory.
        """
        region, target = gradients[self.region], pushed[self.own_share]
        if self.shard:
            incoming = region.new_empty(self.shard)
            self.sent.add("push", (self.num_ranks - 1) * self.shard * region.element_size())
            work = reduce_scatter(incoming, region, async_op=True)

            def make() -> Tensor:
                sums.add(target, incoming[: len(target)])
                return target

            return AsyncResult(make, [work], "push of gradients")
        for hop in self.hops:
            self.sent.add("push", hop.num_sent[1] * region.element_size())

        def start() -> AsyncResult:
            return self._push_by_hops(region, target, sums)

        return OnSideStream(start, region.device) if region.is_cuda else start()

    def _push_by_hops(self, region: Tensor, target: Tensor, sums: RunningSums) -> AsyncResult:
        if len(self.hops) == 1:
            return self.hops[0].reverse(region, target, sums)
        across, within = self.hops
        on_device = RunningSums(on_host=False)
        first = within.reverse(region, region.new_zeros(within.num_source), on_device)
        if region.is_cuda:
            return across.reverse(first.wait(), target, sums)
        return TwoHops(first, lambda landed: across.reverse(landed, target, sums))


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Routes of all units on one rank, and where the intervals that it computes with lie in its flat weights."""

    units: tuple[UnitRoute, ...]
    num_elements: int
    """Of this rank's flat weights and gradients, padding included."""
    intervals: tuple[Interval, ...]
    """Of the whole buffer: what this rank computes with."""
    places: tuple[int, ...]
    """Where each of them begins in the flat weights."""

    def place(self, interval: Interval) -> slice:
        """Slice of the flat weights for an interval of the whole buffer, which must be within one held here."""
        start, end = interval
        if start == end:
            return slice(0, 0)
        index = bisect_right(self.intervals, start, key=_start) - 1
        assert index >= 0 and end <= self.intervals[index][1], f"interval [{start}, {end}) is not held here"
        first = self.places[index] + start - self.intervals[index][0]
        return slice(first, first + end - start)


def routes(
    bounds: Sequence[int],
    owned: Layout,
    computed: Layout,
    *,
    rank: int,
    sent: Traffic,
    nodes: NodeGroups | None = None,
) -> Routes:
    """Routes from the optimization layout ``owned`` to the propagation layout ``computed``, as ``rank`` sees them.

    ``bounds``: unit u is the elements ``bounds[u]`` to ``bounds[u + 1]`` of the buffer. ``nodes``: the groups of this
    rank where ranks are on several nodes.
    """
    num_ranks, held_intervals = owned.num_ranks, computed.intervals[rank]
    distinct = set(computed.intervals)
    is_whole_unit = [_is_whole(first, end, owned, distinct) for first, end in pairwise(bounds)]
    exchanges = _exchanges(bounds, owned, _without(computed, bounds, is_whole_unit), rank=rank, nodes=nodes)
    unit_routes, places = [], []
    region_start = own_start = 0
    for unit, (first, end) in enumerate(pairwise(bounds)):
        own_size = sum(b - a for a, b in _within(owned.intervals[rank], first, end))
        in_region = _Offsets(_within(held_intervals, first, end))
        shard = shard_size(end - first, num_ranks) if is_whole_unit[unit] else 0
        length = shard * num_ranks if shard else in_region.total
        unit_routes.append(
            UnitRoute(
                region=slice(region_start, region_start + length),
                own_share=slice(own_start, own_start + own_size),
                num_ranks=num_ranks,
                shard=shard,
                hops=() if shard else tuple(exchanges[unit]),
                sent=sent,
            )
        )
        places += [region_start + offset for offset in in_region.starts]
        region_start += length
        own_start += own_size
    return Routes(units=tuple(unit_routes), num_elements=region_start, intervals=held_intervals, places=tuple(places))


def _exchanges(
    bounds: Sequence[int], owned: Layout, computed: Layout, *, rank: int, nodes: NodeGroups | None
) -> list[list[SliceExchange]]:
    """The hops of each unit."""
    of_unit: list[list[SliceExchange]] = [[] for _ in bounds[1:]]
    handles = (None,) if nodes is None else (nodes.across.handle, nodes.within.handle)
    ranks_per_node = owned.num_ranks if nodes is None else nodes.ranks_per_node
    for hop, handle in zip(hops_of(rank, owned, computed, ranks_per_node=ranks_per_node), handles):
        moves: list[list[Transfer]] = [[] for _ in of_unit]
        for move in hop.moves:
            moves[bisect_right(bounds, move.start) - 1].append(move)
        for unit, (first, end) in enumerate(pairwise(bounds)):
            source, target = _Offsets(_within(hop.source, first, end)), _Offsets(_within(hop.target, first, end))
            to: dict[int, list[slice]] = {other: [] for other in hop.ranks}
            come: dict[int, list[slice]] = {other: [] for other in hop.ranks}
            for move in moves[unit]:
                if move.source == rank:
                    to[move.target].append(source.of(move.start, move.end))
                if move.target == rank:
                    come[move.source].append(target.of(move.start, move.end))
            of_unit[unit].append(
                SliceExchange(
                    group=handle,
                    place=hop.ranks.index(rank),
                    to=tuple(map(tuple, to.values())),
                    come=tuple(map(tuple, come.values())),
                    num_source=source.total,
                    num_target=target.total,
                )
            )
    return of_unit


def _within(intervals: Sequence[Interval], first: int, end: int) -> list[Interval]:
    return [interval for interval in intervals if first <= interval[0] < end]


class _Offsets:
    """Offsets of pieces in intervals that are laid end to end."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        self.starts, self.total = [], 0
        for start, end in intervals:
            self.starts.append(self.total)
            self.total += end - start

    def of(self, start: int, end: int) -> slice:
        """Slice at which a piece of one of the intervals lies."""
        index = bisect_right(self._intervals, start, key=_start) - 1
        first = self.starts[index] + start - self._intervals[index][0]
        return slice(first, first + end - start)


def _start(interval: tuple[int, ...]) -> int:
    return interval[0]


def _is_whole(first: int, end: int, owned: Layout, computed: Iterable[tuple[Interval, ...]]) -> bool:
    """Whether every rank computes with all of a unit of which ranks own consecutive shares."""
    for intervals in computed:
        index, reached = bisect_left(intervals, first, key=_start), first
        while index < len(intervals) and intervals[index][0] == reached < end:
            reached = intervals[index][1]
            index += 1
        if reached < end:
            return False
    size, index = shard_size(end - first, owned.num_ranks), bisect_left(owned.owners, first, key=_start)
    for rank, start in enumerate(range(first, end, size or 1)):
        if owned.owners[index + rank] != (start, min(start + size, end), rank):
            return False
    return True


def _without(computed: Layout, bounds: Sequence[int], left_out: Sequence[bool]) -> Layout:
    """Copy of a layout without some units."""
    remaining = {
        intervals: tuple(interval for interval in intervals if not left_out[bisect_right(bounds, interval[0]) - 1])
        for intervals in set(computed.intervals)
    }
    return Layout(
        num_elements=computed.num_elements, intervals=tuple(remaining[intervals] for intervals in computed.intervals)
    )


def _sizes(slices: Slices) -> list[int]:
    return [sum(piece.stop - piece.start for piece in of_rank) for of_rank in slices]


def _joined(x: Tensor, slices: Slices) -> Tensor:
    return torch.cat([x[:0], *(x[piece] for of_rank in slices for piece in of_rank)])


def _places(slices: Slices) -> list[tuple[slice, slice]]:
    """Each slice, and where what belongs there lies in pieces that are joined."""
    places, start = [], 0
    for piece in (piece for of_rank in slices for piece in of_rank):
        places.append((piece, slice(start, start + piece.stop - piece.start)))
        start += piece.stop - piece.start
    return places


def _is_in_order(slices: Slices) -> bool:
    """Whether the slices, rank by rank, follow one another without gaps."""
    flat = [piece for of_rank in slices for piece in of_rank]
    return all(before.stop == after.start for before, after in pairwise(flat)) and (not flat or not flat[0].start)
