"""Prefix trees: sequences that begin alike, laid out with what they share once. Pure integers, no torch.

A tree is cut into segments, in depth-first order: a segment comes after the one that it continues, and all that
continue it follow at once. Each sequence is a path from a root to a leaf, the segment that is its own. T slots, S
segments, M sequences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

ROOT = -1
"""The parent of a segment that continues no other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """The segments of some sequences, and which of them each sequence consists of."""

    bounds: tuple[int, ...]
    """[S + 1] offsets of the segments, from 0 to T."""
    parents: tuple[int, ...]
    """[S] the segment that each one continues, or ``ROOT``."""
    leaves: tuple[int, ...]
    """[M] the last segment of each sequence."""

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The fields by name, of which the tree can be made again."""
        return {"bounds": self.bounds, "parents": self.parents, "leaves": self.leaves}

    @property
    def num_slots(self) -> int:
        """The number T of slots: of what the sequences share, each counts once."""
        return self.bounds[-1]

    @property
    def num_pairs(self) -> int:
        """Pairs of a slot and a slot that it attends to, itself included."""
        return int(self.positions.sum()) + self.num_slots

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """[S] the position in its sequences of each segment's first slot."""
        starts = list[int]()
        for parent in self.parents:
            starts.append(0 if parent == ROOT else starts[parent] + self.bounds[parent + 1] - self.bounds[parent])
        return tuple(starts)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each segment the segments that it continues, from a root on, and itself."""
        paths = list[tuple[int, ...]]()
        for segment, parent in enumerate(self.parents):
            paths.append((segment,) if parent == ROOT else (*paths[parent], segment))
        return tuple(paths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """[S] the number after that of the last segment that continues each one, or itself."""
        ends = list(range(1, len(self.parents) + 1))
        for segment in reversed(range(len(self.parents))):
            if (parent := self.parents[segment]) != ROOT:
                ends[parent] = max(ends[parent], ends[segment])
        return tuple(ends)

    @cached_property
    def segments(self) -> np.ndarray:
        """[T] the segment of each slot."""
        return np.repeat(np.arange(len(self.parents)), np.diff(self.bounds))

    @cached_property
    def positions(self) -> np.ndarray:
        """[T] the position of each slot in its sequences."""
        return np.arange(self.num_slots) + (np.asarray(self.starts) - np.asarray(self.bounds[:-1]))[self.segments]

    @cached_property
    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of a segment and the number of a sequence that it is part of."""
        pairs = [(segment, member) for member, leaf in enumerate(self.leaves) for segment in self.paths[leaf]]
        segments, members = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return segments, members

    @cached_property
    def lengths(self) -> np.ndarray:
        """[M] slots of each sequence."""
        segments, members = self.members
        return np.bincount(members, np.diff(self.bounds)[segments], len(self.leaves)).astype(np.int64)

    def summed(self, by_member: np.ndarray) -> np.ndarray:
        """[T] the sum of a value of each sequence, [M], over the sequences that each slot is part of."""
        segments, members = self.members
        return np.bincount(segments, by_member[members], len(self.parents))[self.segments]

    def part_sizes(self, members: Sequence[int]) -> tuple[int, int]:
        """Slots of some of the sequences, those once that they share, and pairs of one and one that it attends to."""
        segments = sorted({segment for member in members for segment in self.paths[self.leaves[member]]})
        lengths = [self.bounds[segment + 1] - self.bounds[segment] for segment in segments]
        pairs = (n * self.starts[segment] + n * (n + 1) // 2 for segment, n in zip(segments, lengths))
        return sum(lengths), sum(pairs)

    def slots_of(self, member: int) -> np.ndarray:
        """[length] the slots of a sequence, in order."""
        path = self.paths[self.leaves[member]]
        return np.concatenate([np.arange(self.bounds[segment], self.bounds[segment + 1]) for segment in path])

    def first(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[T, ...] values of the slots from those of each sequence, which are equal where slots are shared."""
        values = np.empty((self.num_slots, *rows[0].shape[1:]), dtype=np.result_type(*rows))
        for member, row in enumerate(rows):
            values[self.slots_of(member)] = row
        return values

    def mean(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[T, ...] the mean over the sequences that each slot is part of, of their values for it."""
        counts = self.summed(np.ones(len(self.leaves)))
        if (counts <= 1).all():
            return self.first(rows)
        dtype = np.result_type(*rows)
        sums = np.zeros((self.num_slots, *rows[0].shape[1:]), dtype=np.promote_types(dtype, np.float32))
        for member, row in enumerate(rows):
            sums[self.slots_of(member)] += row
        means = sums / counts.reshape(-1, *[1] * (sums.ndim - 1)).astype(sums.dtype)
        return means.astype(dtype) if bool((means.astype(dtype) == means).all()) else means


def prefix_tree(members: Sequence[Mapping[str, np.ndarray]], may_share: Sequence[np.ndarray]) -> PrefixTree:
    """The tree of sequences that have a slot in common where all columns are equal up to and with it.

    ``members``: columns by name of each sequence, one value for each slot; ``may_share``: [length] booleans, whether a
    slot may be shared. A sequence's last slot is its own, whatever they say.
    """
    bounds, parents, leaves = [0], list[int](), [0] * len(members)

    def add(segment_length: int, parent: int) -> int:
        bounds.append(bounds[-1] + segment_length)
        parents.append(parent)
        return len(parents) - 1

    limits = [_first_false(mask[:-1]) for mask in may_share]
    lengths = [len(mask) for mask in may_share]
    waiting = [(list(range(len(members))), 0, ROOT)]
    while waiting:
        group, start, parent = waiting.pop()
        if len(group) == 1:
            leaves[group[0]] = add(lengths[group[0]] - start, parent)
            continue
        shared = _common(members, group, start, min(limits[member] for member in group))
        if shared > start:
            parent = add(shared - start, parent)
        waiting += [(part, shared, parent) for part in reversed(_parts(members, group, shared, limits))]
    return PrefixTree(bounds=tuple(bounds), parents=tuple(parents), leaves=tuple(leaves))


def _common(members: Sequence[Mapping[str, np.ndarray]], group: list[int], start: int, limit: int) -> int:
    """The end of the slots from ``start`` on, at most ``limit``, in which all sequences of ``group`` are equal."""
    first = members[group[0]]
    for member in group[1:]:
        for name, values in first.items():
            if limit <= start:
                return start
            equal = values[start:limit] == members[member][name][start:limit]
            limit = start + _first_false(equal.reshape(len(equal), -1).all(axis=1))
    return limit


def _parts(
    members: Sequence[Mapping[str, np.ndarray]], group: list[int], slot: int, limits: Sequence[int]
) -> list[list[int]]:
    """Cut a group into those that are equal at ``slot`` and may share it, and single sequences."""
    parts = dict[object, list[int]]()
    for member in group:
        columns = members[member].values()
        key = member if slot >= limits[member] else tuple(values[slot].tobytes() for values in columns)
        parts.setdefault(key, []).append(member)
    return list(parts.values())


def _first_false(mask: np.ndarray) -> int:
    """How many values are true before the first one that is not."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def in_pack(trees: Iterable[PrefixTree | None], cu_seqlens: Sequence[int]) -> PrefixTree:
    """One tree of all trees of a pack, whose slots are between two ``cu_seqlens`` each; None: of padding."""
    bounds, parents, leaves = [0], list[int](), list[int]()
    for tree, (start, end) in zip(trees, pairwise(cu_seqlens)):
        before = len(parents)
        if tree is None:
            bounds.append(end)
            parents.append(ROOT)
            continue
        assert tree.num_slots == end - start, "a pack is laid out by the slots of its trees"
        bounds += [start + bound for bound in tree.bounds[1:]]
        parents += [ROOT if parent == ROOT else before + parent for parent in tree.parents]
        leaves += [before + leaf for leaf in tree.leaves]
    return PrefixTree(bounds=tuple(bounds), parents=tuple(parents), leaves=tuple(leaves))
