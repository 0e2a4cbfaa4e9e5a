"""Which rank holds which slice of a flat parameter buffer, and who sends what to whom to change that.

Every parameter is stored so that the dimension a method shards is its first, hence each rank's share of anything is a
set of half-open intervals of one flat buffer, and moving between two layouts is interval intersection. Pure integers:
tested without a process group, priced by the simulator, reused by checkpoints.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec

Interval = tuple[int, int]
"""[start, end) in elements of the flat buffer; never empty."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """For each rank, the sorted and disjoint intervals of a buffer of ``num_elements`` that it holds."""

    num_elements: int
    intervals: tuple[tuple[Interval, ...], ...]
    """One tuple of intervals per rank; a rank may hold none."""

    def __post_init__(self) -> None:
        for rank, rank_intervals in enumerate(self.intervals):
            last = 0
            for start, end in rank_intervals:
                if not last <= start < end <= self.num_elements:
                    raise InputError(
                        f"rank {rank}: interval [{start}, {end}) is empty, out of order or outside the buffer of "
                        f"{self.num_elements} elements"
                    )
                last = end

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout, those that hold nothing included."""
        return len(self.intervals)

    def num_held(self, rank: int) -> int:
        """Elements that ``rank`` holds."""
        return sum(end - start for start, end in self.intervals[rank])

    @cached_property
    def owners(self) -> list[tuple[int, int, int]]:
        """(start, end, rank) of every interval, in the order of the buffer."""
        return sorted(
            (start, end, rank) for rank, rank_intervals in enumerate(self.intervals) for start, end in rank_intervals
        )

    @cached_property
    def owns_each_element_once(self) -> bool:
        """Whether the ranks together hold every element, and no two the same."""
        ends = [0, *(end for _, end, _ in self.owners)]
        return ends[-1] == self.num_elements and all(start == end for (start, _, _), end in zip(self.owners, ends))


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


def sharded_by_unit(bounds: Sequence[int], num_ranks: int) -> Layout:
    """Each unit of the buffer, elements ``bounds[u]`` to ``bounds[u + 1]``, fully sharded by itself.

    So that every rank owns a share of every unit: a unit can be moved alone, and all ranks send as much.
    """
    intervals_of_rank: list[list[Interval]] = [[] for _ in range(num_ranks)]
    for first, end in pairwise(bounds):
        for rank, intervals in enumerate(fully_sharded(end - first, num_ranks).intervals):
            intervals_of_rank[rank] += [(first + a, first + b) for a, b in intervals]
    return Layout(num_elements=bounds[-1], intervals=tuple(map(tuple, intervals_of_rank)))


def shard_size(num_elements: int, num_ranks: int) -> int:
    """Elements of the largest shard of :func:`fully_sharded`."""
    return -(-num_elements // num_ranks)


def transfers(source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """Who sends which slice to whom so that ``target`` holds what ``source`` has; sorted by (target, start).

    ``source`` must own each element once. A rank that already holds an element sends it to itself (a local copy).

    Raises:
        InputError: the layouts are of buffers of different size, or ``source`` misses or repeats an element.
    """
    check_movable(source, target)
    starts = [start for start, _, _ in source.owners]
    return tuple(
        Transfer(source=owner, target=rank, start=start, end=end)
        for rank, rank_intervals in enumerate(target.intervals)
        for start, end, owner in overlaps_in(rank_intervals, source.owners, starts)
    )


def transfers_of(rank: int, source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """The :func:`transfers` that ``rank`` sends or receives, in the same order, without working out the others.

    Raises:
        InputError: as :func:`transfers`.
    """
    check_movable(source, target)
    return moves_of(rank, source, target)


def moves_of(rank: int, source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """:func:`transfers_of` where the ranks of ``source`` together hold what those of ``target`` do, if not everything.

    No two of ``source`` hold the same.
    """
    starts = [start for start, _, _ in source.owners]
    sent_intervals = [(start, end, rank) for start, end in source.intervals[rank]]
    sent_starts = [start for start, _, _ in sent_intervals]
    sent: dict[tuple[Interval, ...], list[tuple[int, int, int]]] = {}  # many ranks hold the same
    moves = []
    for other, rank_intervals in enumerate(target.intervals):
        if other == rank:
            overlaps = overlaps_in(rank_intervals, source.owners, starts)
        else:
            if rank_intervals not in sent:
                sent[rank_intervals] = overlaps_in(rank_intervals, sent_intervals, sent_starts)
            overlaps = sent[rank_intervals]
        moves += [Transfer(source=owner, target=other, start=start, end=end) for start, end, owner in overlaps]
    return tuple(moves)


def check_movable(source: Layout, target: Layout) -> None:
    """Raise ``InputError`` unless both are layouts of one buffer and ``source`` owns each element once."""
    if source.num_elements != target.num_elements:
        raise InputError(f"a buffer of {source.num_elements} elements cannot become one of {target.num_elements}")
    if not source.owns_each_element_once:
        raise InputError("the source layout must own each element exactly once")


def overlaps_in(
    wanted: Sequence[Interval], owners: Sequence[tuple[int, int, int]], starts: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The pieces of ``wanted`` that lie in ``owners``, which ascend and begin at ``starts``."""
    overlaps = []
    for start, end in wanted:
        for index in range(max(0, bisect_right(starts, start) - 1), len(owners)):
            first, last, owner = owners[index]
            if first >= end:
                break
            if last > start:
                overlaps.append((max(first, start), min(last, end), owner))
    return overlaps


_UNITS = {
    "qkv": "groups", "qkv_bias": "groups", "proj": "groups",
    "gate": "columns", "up": "columns", "up_bias": "columns", "down": "columns",
    "embedding": "vocabulary", "head": "vocabulary", "output_bias": "vocabulary",
    **dict.fromkeys((
        "attention_norm", "attention_norm_bias", "proj_bias", "ffn_norm", "ffn_norm_bias", "down_bias",
        "position", "token_type", "embedding_norm", "embedding_norm_bias",
        "transform", "transform_bias", "transform_norm", "transform_norm_bias", "final_norm", "final_norm_bias",
    )),
}  # fmt: skip
"""By the last part of a parameter's name, in what its rows are dealt to ranks; None: every rank has all of them."""


def row_bounds(name: str, spec: ModelSpec, *, degree: int) -> tuple[int, ...] | None:
    """Where weights are sharded, rank r of a stage holds rows ``bounds[r]`` to ``bounds[r + 1]`` of the one ``name``.

    None: all of them. One layout for all methods on sharded weights (ParaDySe, table 2): queries, keys, values and the
    projection back by key/value head with its queries, the feed-forward by column, the vocabulary by row; norms and
    whatever else is small are whole on every rank. Shares differ by one head, column or row, and may be empty. The last
    part of the name decides; a parameter that ``_UNITS`` does not have is refused.
    """
    kind = name.rpartition(".")[2]
    assert kind in _UNITS, f"nothing says how ranks share the parameter {name}; add it to _UNITS"
    unit = _UNITS[kind]
    if unit is None:
        return None
    count = {"groups": spec.num_kv_heads, "columns": spec.ffn_columns, "vocabulary": spec.vocab_size}[unit]
    group_size = spec.num_heads // spec.num_kv_heads
    rows = {"qkv": group_size + 2, "qkv_bias": group_size + 2, "proj": group_size}.get(kind, 0) * spec.head_size or 1
    return tuple(rank * count // degree * rows for rank in range(degree + 1))
