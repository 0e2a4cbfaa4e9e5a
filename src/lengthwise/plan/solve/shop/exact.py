"""A handful of jobs: all dispatches and all packings.

Sets of jobs are bit masks. The best packing of every set on every type comes from all partitions of all sets (21,147
for eight jobs), the best dispatch from adding machines one by one.
"""

from functools import lru_cache

import numpy as np

from lengthwise.plan.solve.shop.model import Objective, ShopProblem
from lengthwise.plan.solve.shop.pack import Batches


def exact(problem: ShopProblem) -> tuple[float, list[list[int]], list[Batches]]:
    """A time before which no schedule ends, and the best schedule among those that respect `min_fill`.

    The bound is the best of all schedules, whatever they fill. Cost grows like 5 ** jobs; meant for eight.
    """
    num_jobs = len(problem.sizes)
    blocks, counts, starts = _partitions(num_jobs)
    free, shortest_spans, ways = [], [], []
    for kind, machines in enumerate(problem.machines):
        sums = _subset_sums(problem.taken[kind].astype(np.float64))
        times = _subset_sums(problem.work[kind]) + machines.setup
        times[0] = 0.0
        impossible = (sums > machines.capacity) | ~np.isfinite(times)
        times[impossible] = 0.0
        longest = times[blocks].max(axis=1)
        if problem.objective is Objective.FLOW_SHOP:
            spans = times[blocks].sum(axis=1) + (machines.stages - 1) * longest
        else:
            spans = longest * (machines.stages - 1 + counts)
        spans[impossible[blocks].any(axis=1)] = np.inf
        free.append(np.minimum.reduceat(spans, starts))
        masks = np.repeat(np.arange(1 << num_jobs), np.diff(np.append(starts, len(counts))))
        forced = np.minimum.reduceat(np.where(np.isfinite(spans), counts, num_jobs), starts)
        allowed = np.maximum(forced, np.maximum(1, sums // machines.min_fill))
        spans[counts > allowed[masks]] = np.inf
        shortest_spans.append(np.minimum.reduceat(spans, starts))
        ways.append([_first(spans, start, best) for start, best in zip(starts.tolist(), shortest_spans[-1].tolist())])
    bound, _ = _dispatch(problem, free)
    _, sets = _dispatch(problem, shortest_spans)
    jobs, packed = [], []
    for kind, mask in zip(problem.kinds, sets):
        mine = _members(mask)
        jobs.append(mine)
        row = blocks[ways[kind][mask]].tolist()
        packed.append([[mine.index(job) for job in _members(block)] for block in row if block])
    return bound, jobs, packed


def _first(spans: np.ndarray, start: int, best: float) -> int:
    """Index of the first partition from `start` on with this span; of no use if that is infinite."""
    index = start
    while spans[index] != best:
        index += 1
    return index


def _dispatch(problem: ShopProblem, best: list[np.ndarray]) -> tuple[float, list[int]]:
    """Least makespan and the set of jobs of each machine, from the least span of each set on each type."""
    masks, subsets, starts = _subsets(len(problem.sizes))
    ends = np.full(len(starts), np.inf)
    ends[0] = 0.0
    chosen: list[np.ndarray] = []
    for kind in problem.kinds:
        values = np.maximum(ends[masks ^ subsets], best[kind][subsets])
        ends = np.minimum.reduceat(values, starts)
        hits = np.flatnonzero(values == ends[masks])
        _, first = np.unique(masks[hits], return_index=True)
        chosen.append(subsets[hits[first]])
    left = len(starts) - 1
    sets = []
    for subsets_of in reversed(chosen):
        sets.append(int(subsets_of[left]))
        left ^= sets[-1]
    return float(ends[-1]), sets[::-1]


def _members(mask: int) -> list[int]:
    return [job for job in range(mask.bit_length()) if mask >> job & 1]


def _subset_sums(values: np.ndarray) -> np.ndarray:
    """Sum of the values of every set."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums


@lru_cache(maxsize=8)
def _subsets(num_jobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of a set and a subset of it, by set, and where each set starts."""
    pairs = [(mask, subset) for mask in range(1 << num_jobs) for subset in range(mask + 1) if not subset & ~mask]
    masks, subsets = np.array(pairs).T
    return masks, subsets, np.searchsorted(masks, np.arange(1 << num_jobs))


@lru_cache(maxsize=8)
def _partitions(num_jobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All partitions of all sets, by set: their blocks padded with 0, number of blocks, where each set starts."""
    partitions_of: list[list[list[int]]] = [[[]]]
    for mask in range(1, 1 << num_jobs):
        lowest = mask & -mask
        rest = mask ^ lowest
        partitions_of.append(
            [
                [lowest | others, *partition]
                for others in range(rest + 1)
                if not others & ~rest
                for partition in partitions_of[rest ^ others]
            ]
        )
    rows = [partition for partitions in partitions_of for partition in partitions]
    blocks = np.zeros((len(rows), max(num_jobs, 1)), dtype=np.int64)
    for row, partition in enumerate(rows):
        blocks[row, : len(partition)] = partition
    starts = np.cumsum([0] + [len(partitions) for partitions in partitions_of[:-1]])
    return blocks, np.array([len(partition) for partition in rows]), starts
