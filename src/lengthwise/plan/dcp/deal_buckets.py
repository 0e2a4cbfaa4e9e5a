"""Deals sequences, bucket by bucket and the longest first, to device groups; each forms micro-batches of its own.

A group that works already is filled up to a deadline, the fullest that can take the sequence first; then one of the
type that suits the bucket begins to work. So a group computes few buckets, and few of its micro-batches are partial.
What no group can take by the deadline goes where it ends earliest (LPT, Graham 1969, on groups of several types).
A sequence that opens a micro-batch costs its overhead too.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketCosts:
    """What a bucket costs on each of K types of group."""

    times_s: Sequence[np.ndarray]
    """[K][n] seconds that each sequence, longest first, adds to a micro-batch; unused for types that do not hold it."""
    overhead_s: Sequence[float]
    """[K] seconds of a micro-batch before its first sequence."""
    batch_sizes: Sequence[int]
    """[K] most sequences of a micro-batch."""
    preferred: Sequence[int]
    """The types that hold the bucket, the one with the fewest device-seconds first."""


class Dealer:
    """The loads of some groups while buckets are dealt to them."""

    def __init__(self, groups: Sequence[int], deadline_s: float) -> None:
        """Groups of each type [K], numbered type by type."""
        self.types = [group_type for group_type, count in enumerate(groups) for _ in range(count)]
        self.deadline_s = deadline_s
        self.loads_s = [0.0] * len(self.types)
        self._working: list[list[tuple[float, int]]] = [[] for _ in groups]
        self._idle: list[list[int]] = [[] for _ in groups]
        for group in reversed(range(len(self.types))):
            self._idle[self.types[group]].append(group)

    def deal(self, costs: BucketCosts) -> dict[int, list[int]]:
        """Which sequences of a bucket each group computes, in order. O(n types log groups)."""
        rows = [times_s.tolist() for times_s in costs.times_s]
        dealt: dict[int, list[int]] = {}
        group, group_type, load_s, size = -1, -1, 0.0, 0
        mine: list[int] = []
        for sequence in range(len(rows[0])):
            if group >= 0:
                end_s = (
                    load_s + rows[group_type][sequence] + (0.0 if len(mine) % size else costs.overhead_s[group_type])
                )
                if end_s <= self.deadline_s:
                    mine.append(sequence)
                    load_s = end_s
                    continue
                self._put(group, load_s)
            group = self._take(sequence, rows, costs)
            group_type, load_s, mine = self.types[group], self.loads_s[group], dealt.setdefault(group, [])
            size = costs.batch_sizes[group_type]
            load_s += rows[group_type][sequence] + (0.0 if len(mine) % size else costs.overhead_s[group_type])
            mine.append(sequence)
        self._put(group, load_s)
        return dealt

    def _put(self, group: int, load_s: float) -> None:
        self.loads_s[group] = load_s
        insort(self._working[self.types[group]], (load_s, group))

    def _take(self, sequence: int, rows: Sequence[list[float]], costs: BucketCosts) -> int:
        """The group for a sequence, taken out of its list."""
        deadline_s, last = self.deadline_s, len(self.types)
        best, best_end_s, place = -1, -1.0, 0
        for group_type in costs.preferred:
            working = self._working[group_type]
            room_s = deadline_s - rows[group_type][sequence] - costs.overhead_s[group_type]
            if working and working[0][0] <= room_s:
                index = bisect_right(working, (room_s, last)) - 1
                if (end_s := working[index][0] - room_s) > best_end_s or best < 0:
                    best, best_end_s, place = group_type, end_s, index
        if best >= 0:
            return self._working[best].pop(place)[1]
        for group_type in costs.preferred:
            if self._idle[group_type] and rows[group_type][sequence] + costs.overhead_s[group_type] <= deadline_s:
                return self._idle[group_type].pop()
        return self._take_earliest(sequence, rows, costs)

    def _take_earliest(self, sequence: int, rows: Sequence[list[float]], costs: BucketCosts) -> int:
        best, best_end_s = -1, np.inf
        for group_type in costs.preferred:
            load_s = 0.0 if self._idle[group_type] else self._working[group_type][0][0]
            if (end_s := load_s + rows[group_type][sequence] + costs.overhead_s[group_type]) < best_end_s:
                best, best_end_s = group_type, end_s
        return self._idle[best].pop() if self._idle[best] else self._working[best].pop(0)[1]


def evenly(items: Sequence[int], max_items: int) -> list[tuple[int, ...]]:
    """The fewest runs of at most ``max_items`` items each, of equal size give or take one."""
    count = -(-len(items) // max_items)
    num_each, more = divmod(len(items), count)
    starts = [number * num_each + min(number, more) for number in range(count + 1)]
    return [tuple(items[start:end]) for start, end in pairwise(starts)]
