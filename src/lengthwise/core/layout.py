"""Which rank holds which slice of a flat parameter buffer, and who sends what to whom to change that.

Every parameter is stored so that the dimension a method shards is its first, hence each rank's share of anything is a
set of half-open intervals of one flat buffer, and moving between two layouts is interval intersection. Pure integers:
tested without a process group, priced by the simulator, reused by checkpoints.
"""

from bisect import bisect_right
from dataclasses import dataclass

from lengthwise.core.errors import InputError

Interval = tuple[int, int]
"""[start, end) in elements of the flat buffer; never empty."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """For each rank, the sorted and disjoint intervals of a buffer of ``num_elements`` that it holds."""

    num_elements: int
    intervals: tuple[tuple[Interval, ...], ...]
    """One tuple of intervals per rank; a rank may hold none."""

    def __post_init__(self) -> None:
        for rank, held in enumerate(self.intervals):
            last = 0
            for start, end in held:
                if not last <= start < end <= self.num_elements:
                    raise InputError(
                        f"rank {rank}: interval [{start}, {end}) is empty, out of order or outside the buffer of "
                        f"{self.num_elements} elements"
                    )
                last = end

    @property
    def num_ranks(self) -> int:
        """Ranks the layout speaks of."""
        return len(self.intervals)

    def num_held(self, rank: int) -> int:
        """Elements that ``rank`` holds."""
        return sum(end - start for start, end in self.intervals[rank])

    def owns_each_element_once(self) -> bool:
        """Whether the ranks together hold every element, and no two the same."""
        everything = sorted(interval for held in self.intervals for interval in held)
        ends = [0, *(end for _, end in everything)]
        return ends[-1] == self.num_elements and all(start == end for (start, _), end in zip(everything, ends))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One slice that moves: ``source`` sends elements [start, end) to ``target`` (itself, if it already holds them)."""

    source: int
    target: int
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """Elements that move."""
        return self.end - self.start


def fully_sharded(num_elements: int, num_ranks: int) -> Layout:
    """Consecutive shards of ``ceil(num_elements / num_ranks)``; the last ranks hold less, or nothing.

    These are the shards of a one-dimensional DTensor with ``Shard(0)``, so checkpoints re-shard by themselves.
    """
    size = shard_size(num_elements, num_ranks)
    bounds = [(min(rank * size, num_elements), min((rank + 1) * size, num_elements)) for rank in range(num_ranks)]
    return Layout(num_elements=num_elements, intervals=tuple(((a, b),) if a < b else () for a, b in bounds))


def shard_size(num_elements: int, num_ranks: int) -> int:
    """Elements of the largest shard of :func:`fully_sharded`."""
    return -(-num_elements // num_ranks)


def replicated(num_elements: int, num_ranks: int) -> Layout:
    """Every rank holds everything."""
    whole = ((0, num_elements),) if num_elements else ()
    return Layout(num_elements=num_elements, intervals=(whole,) * num_ranks)


def transfers(source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """Who sends which slice to whom so that ``target`` holds what ``source`` has; sorted by (target, start).

    ``source`` must own each element once. A rank that already holds an element sends it to itself (a local copy).

    Raises:
        InputError: the layouts are of buffers of different size, or ``source`` misses or repeats an element.
    """
    if source.num_elements != target.num_elements:
        raise InputError(f"a buffer of {source.num_elements} elements cannot become one of {target.num_elements}")
    if not source.owns_each_element_once():
        raise InputError("the source layout must own each element exactly once")
    owned = sorted((start, end, rank) for rank, held in enumerate(source.intervals) for start, end in held)
    starts = [start for start, _, _ in owned]
    moves = []
    for rank, held in enumerate(target.intervals):
        for start, end in held:
            at = bisect_right(starts, start) - 1
            while start < end:
                stop = min(end, owned[at][1])
                moves.append(Transfer(source=owned[at][2], target=rank, start=start, end=stop))
                start, at = stop, at + 1
    return tuple(moves)
