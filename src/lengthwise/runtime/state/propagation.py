"""Pull and push: how each unit's weights come from their owners to whoever computes with them, and gradients back.

Owners hold their shares in the optimization layout, ranks compute in a propagation layout. Of every unit, all ranks
issue one collective each way. Where every rank computes with all of a unit these are an all-gather and a
reduce-scatter, else all-to-alls of exactly the slices that :func:`lengthwise.core.layout.transfers` counts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.core.layout import Interval, Layout, Transfer, shard_size, transfers_of
from lengthwise.runtime.comm.collectives import all_gather, all_to_all, reduce_scatter
from lengthwise.runtime.comm.group import AsyncResult, Traffic

Slices = tuple[tuple[slice, ...], ...]
"""For each rank, some slices of a tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitRoute:
    """Route of one unit's weights and gradients between owners and the ranks that compute, as one rank sees it."""

    rank: int
    region: slice
    """Of this rank's flat weights and gradients: what it computes with, in the order of the buffer, then padding."""
    own_share: slice
    """Of this rank's flat master weights: its share of the unit."""
    shard: int
    """Elements of the largest share where all ranks compute with the whole unit; else 0."""
    to: Slices
    """For each rank: what it computes with of our share, counted from the share's start.

    Empty where ``shard`` is not 0."""
    come: Slices
    """For each rank: what it owns of our region, counted from the region's start.

    Empty where ``shard`` is not 0."""
    sent: Traffic

    def pull(self, own_share: Tensor, weights: Tensor) -> AsyncResult:
        """Fill the region of ``weights`` from every owner's share; ``own_share``: this rank's, in the compute dtype."""
        region = weights[self.region]
        if self.shard:
            own_share = (
                own_share
                if len(own_share) == self.shard
                else torch.cat([own_share, own_share.new_zeros(self.shard - len(own_share))])
            )
            self.sent.add("pull", (len(self.to) - 1) * self.shard * own_share.element_size())
            work = all_gather(region, own_share, async_op=True)
            return AsyncResult(lambda keep=own_share: region, [work], "pull of weights")  # type: ignore[misc]
        outgoing, send, receive = _joined(own_share, self.to), _sizes(self.to), _sizes(self.come)
        self.sent.add("pull", (sum(send) - send[self.rank]) * own_share.element_size())
        direct = _is_in_order(self.come)
        incoming = region if direct else torch.empty_like(region)
        work = all_to_all(incoming, outgoing, receive=receive, send=send, async_op=True)

        def make(keep: Tensor = outgoing) -> Tensor:
            if not direct:
                for target, piece in _pieces(incoming, self.come):
                    region[target] = piece
            return region

        return AsyncResult(make, [work], "pull of weights")

    def push(self, gradients: Tensor, pushed: Tensor) -> AsyncResult:
        """Add every rank's gradients of our share to its part of ``pushed``, rank by rank."""
        region, target = gradients[self.region], pushed[self.own_share]
        if self.shard:
            incoming = region.new_empty(self.shard)
            self.sent.add("push", (len(self.to) - 1) * self.shard * region.element_size())
            work = reduce_scatter(incoming, region, async_op=True)
            return AsyncResult(lambda: target.add_(incoming[: len(target)]), [work], "push of gradients")
        outgoing = region if _is_in_order(self.come) else _joined(region, self.come)
        send, receive = _sizes(self.come), _sizes(self.to)
        self.sent.add("push", (sum(send) - send[self.rank]) * region.element_size())
        incoming = region.new_empty(sum(receive))
        work = all_to_all(incoming, outgoing, receive=receive, send=send, async_op=True)

        def make(keep: Tensor = outgoing) -> Tensor:
            for rows, piece in _pieces(incoming, self.to):
                target[rows] += piece
            return target

        return AsyncResult(make, [work], "push of gradients")


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


def routes(bounds: Sequence[int], owned: Layout, computed: Layout, *, rank: int, sent: Traffic) -> Routes:
    """Routes from the optimization layout ``owned`` to the propagation layout ``computed``, as ``rank`` sees them.

    ``bounds``: unit u is the elements ``bounds[u]`` to ``bounds[u + 1]`` of the buffer.
    """
    num_ranks, held_intervals = owned.num_ranks, computed.intervals[rank]
    distinct = set(computed.intervals)
    is_whole_unit = [_is_whole(first, end, owned, distinct) for first, end in pairwise(bounds)]
    moves: list[list[Transfer]] = [[] for _ in is_whole_unit]
    for move in transfers_of(rank, owned, _without(computed, bounds, is_whole_unit)):
        moves[bisect_right(bounds, move.start) - 1].append(move)
    unit_routes, places = [], []
    region_start = own_start = 0
    for unit, (first, end) in enumerate(pairwise(bounds)):
        own_intervals = [interval for interval in owned.intervals[rank] if first <= interval[0] < end]
        mine = [interval for interval in held_intervals if first <= interval[0] < end]
        in_own, in_region = _Offsets(own_intervals), _Offsets(mine)
        to: list[list[slice]] = [[] for _ in range(num_ranks)]
        come: list[list[slice]] = [[] for _ in range(num_ranks)]
        for move in moves[unit]:
            if move.source == rank:
                to[move.target].append(in_own.of(move.start, move.end))
            if move.target == rank:
                come[move.source].append(in_region.of(move.start, move.end))
        shard = shard_size(end - first, num_ranks) if is_whole_unit[unit] else 0
        length = shard * num_ranks if shard else in_region.total
        unit_routes.append(
            UnitRoute(
                rank=rank,
                region=slice(region_start, region_start + length),
                own_share=slice(own_start, own_start + in_own.total),
                shard=shard,
                to=tuple(map(tuple, to)),
                come=tuple(map(tuple, come)),
                sent=sent,
            )
        )
        places += [region_start + offset for offset in in_region.starts]
        region_start += length
        own_start += in_own.total
    return Routes(units=tuple(unit_routes), num_elements=region_start, intervals=held_intervals, places=tuple(places))


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


def _pieces(joined: Tensor, slices: Slices) -> Iterator[tuple[slice, Tensor]]:
    start = 0
    for of_rank in slices:
        for piece in of_rank:
            size = piece.stop - piece.start
            yield piece, joined[start : start + size]
            start += size


def _is_in_order(slices: Slices) -> bool:
    """Whether the slices, rank by rank, follow one another without gaps."""
    flat = [piece for of_rank in slices for piece in of_rank]
    return all(before.stop == after.start for before, after in pairwise(flat)) and (not flat or not flat[0].start)
