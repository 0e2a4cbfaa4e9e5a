"""Strategies next to a strategy: some pipelines exchanged for others on as many devices.

Moves have one signature: the cluster, the strategy, and about how many devices to move where that is open.
"""

from collections.abc import Iterator
from math import lcm

from lengthwise.plan.heterogeneous.propose.tiling import Counts, Tiler


def exchanges(tiler: Tiler, counts: Counts, unit: int) -> Iterator[Counts]:
    """Exchange pipelines of one candidate for another's: about ``unit`` devices, as few as possible, or all of them."""
    sizes = tiler.sizes
    for old, num_old in enumerate(counts):
        if not num_old:
            continue
        for new, size in enumerate(sizes):
            if new == old:
                continue
            step = lcm(sizes[old], size)
            times = min(max(1, unit // step), num_old * sizes[old] // step)
            if times:
                yield _changed(counts, {old: -times * step // sizes[old], new: times * step // size})


def refills(tiler: Tiler, counts: Counts, unit: int) -> Iterator[Counts]:
    """Exchange one pipeline for a smaller one of each candidate, and what fills the rest best."""
    for old, num_old in enumerate(counts):
        if not num_old:
            continue
        for new, size in enumerate(tiler.sizes):
            if new != old and size <= tiler.sizes[old]:
                filled = tiler.fill(_changed(counts, {old: -1, new: 1}))
                if filled is not None:
                    yield filled


def splits(tiler: Tiler, counts: Counts, unit: int) -> Iterator[Counts]:
    """Exchange one pipeline for one of a second candidate and some of a third."""
    sizes = tiler.sizes
    for old, num_old in enumerate(counts):
        for first, size in enumerate(sizes):
            rest = sizes[old] - size
            if not num_old or first == old or rest < 1:
                continue
            for many, other in enumerate(sizes):
                if many not in (old, first) and rest % other == 0:
                    yield _changed(counts, {old: -1, first: 1, many: rest // other})


def merges(tiler: Tiler, counts: Counts, unit: int) -> Iterator[Counts]:
    """Exchange one pipeline of one candidate and some of a second for one of a third."""
    sizes = tiler.sizes
    for first, num_first in enumerate(counts):
        for many, more in enumerate(counts):
            if not num_first or not more or first == many:
                continue
            for new, size in enumerate(sizes):
                rest = size - sizes[first]
                if new not in (first, many) and rest > 0 and rest % sizes[many] == 0 and rest // sizes[many] <= more:
                    yield _changed(counts, {first: -1, many: -rest // sizes[many], new: 1})


def _changed(counts: Counts, changes: dict[int, int]) -> Counts:
    return tuple(count + changes.get(candidate, 0) for candidate, count in enumerate(counts))
