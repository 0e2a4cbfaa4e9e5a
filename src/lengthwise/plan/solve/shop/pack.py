"""One machine: its jobs into batches of bounded size, so that it ends early."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.shop.model import Machines, Objective, balanced_span, ideal_count, span

Batches = list[list[int]]
COUNTS = 16
"""Numbers of batches that are tried, the most promising first."""
IMPROVED = 3
"""Numbers of batches for which moves and swaps are tried, the best first."""
PARTNERS = 4
"""Batches, the shortest first, that the longest one exchanges jobs with."""
SHARES = range(1, 9)
"""Jobs per batch for which it is counted how many batches they need."""
MOST_PLACED = 1 << 22
"""Jobs placed, over all numbers of batches that are tried, beyond which the best packing found so far will do."""
MOST_IN_VAIN = 1 << 20
"""Jobs placed for numbers of batches that turn out to be too few, before only those are tried that first fit needs."""
CLOSE = 1e-4
"""Relative distance to what could be reached at best at which packing is content."""


def pack(
    work: Sequence[float],
    sizes: Sequence[int],
    machines: Machines,
    *,
    objective: Objective,
    enough: float = 0.0,
    swaps: int = 20,
) -> tuple[float, Batches]:
    """Span and batches of one machine, in positions of `work`, which does not increase; a span of `enough` will do.

    Numbers of batches are tried in the order of the span that they could reach, until none can beat the best found.
    """
    if not work:
        return 0.0, []
    single_batch = [list(range(len(work)))]
    if machines.stages == 1:
        if sum(sizes) <= machines.capacity:
            return math.fsum(work) + machines.setup, single_batch
        if objective is Objective.FLOW_SHOP:
            batches = fewest_batches(sizes, machines.capacity)
            return math.fsum(work) + len(batches) * machines.setup, batches
    total_size = sum(sizes)
    max_count = max(-(-total_size // machines.capacity), min(len(work), total_size // machines.min_fill))
    candidates: list[tuple[float, float, Batches]] = []
    best, needed, placed, in_vain = math.inf, fewest_conceivable(sizes, machines.capacity), 0, 0
    for ideal, count in _counts(work, sizes, machines, objective):
        if candidates and (
            best <= enough or ideal * (1 + CLOSE) >= best or count > max_count or len(candidates) >= COUNTS
        ):
            break
        if candidates and placed > MOST_PLACED:
            break
        if count < needed:
            continue
        placed += len(work)
        batches = spread(work, sizes, count, machines.capacity)
        if batches:
            candidates.append((_value(work, batches, machines, objective), ideal, batches))
            best = min(best, candidates[-1][0])
            continue
        in_vain += len(work)
        if in_vain > MOST_IN_VAIN:  # every next number could fail as this one did
            needed, in_vain = max(needed, len(first_fit_decreasing(sizes, machines.capacity))), 0
    candidates.sort(key=lambda candidate: candidate[0])
    packed = [(value, batches) for value, _, batches in candidates]
    for number, (value, ideal, batches) in enumerate(candidates[:IMPROVED] if swaps else []):
        if best > enough and ideal * (1 + CLOSE) < best and value > ideal * (1 + CLOSE):
            improve(work, sizes, batches, capacity=machines.capacity, swaps=swaps)
            packed[number] = _value(work, batches, machines, objective), batches
            best = min(best, packed[number][0])
    return min(packed, key=lambda value_of: value_of[0])


def _value(work: Sequence[float], batches: Batches, machines: Machines, objective: Objective) -> float:
    """Span of these batches; infinite without any."""
    if not batches:
        return math.inf
    times = [sum([work[job] for job in batch]) + machines.setup for batch in batches]
    return span(times, machines.stages, objective)


def fewest_conceivable(sizes: Sequence[int], capacity: int) -> int:
    """Batches below which there is no room (Martello and Toth, 1990, bound L2; and how many jobs a batch holds).

    Jobs larger than half of the capacity have a batch each. With one larger than capacity - a there is no job of at
    least a, so such jobs have the room that all other large ones leave, for any a. And of jobs larger than
    capacity / (k + 1), a batch holds k at most.
    """
    ascending = np.sort(np.asarray(sizes))
    up_to = np.searchsorted(ascending, [capacity // (k + 1) for k in SHARES], side="right").tolist()
    num_jobs, num_small = len(ascending), up_to[0]
    fewest = max(-(-(num_jobs - first) // k) for k, first in zip(SHARES, up_to))
    sums = np.concatenate([[0], np.cumsum(ascending)])
    fewest = max(fewest, -(-int(sums[-1]) // capacity))
    if num_small and num_small < num_jobs:
        small = ascending[:num_small]
        beside = np.searchsorted(ascending, capacity - small, side="right")  # jobs that may share with each small one
        over = sums[beside] - sums[:num_small] - (beside - num_small) * capacity
        fewest = max(fewest, num_jobs - num_small - int((-over // capacity).min()))
    return fewest


def fewest_batches(sizes: Sequence[int], capacity: int) -> Batches:
    """Few batches: evenly filled if the least conceivable number can be, else first fit decreasing."""
    return spread(sizes, sizes, -(-sum(sizes) // capacity), capacity) or first_fit_decreasing(sizes, capacity)


def _counts(
    work: Sequence[float], sizes: Sequence[int], machines: Machines, objective: Objective
) -> Iterator[tuple[float, int]]:
    """Span that balance would reach and number of batches, best first: outwards from the ideal, as the span is convex.

    Numbers beyond `min_fill` come last: they are of use only if all others failed for lack of capacity.
    """
    total = math.fsum(work)
    fewest = -(-sum(sizes) // machines.capacity)
    max_count = max(fewest, min(len(work), sum(sizes) // machines.min_fill))

    def reachable(count: int) -> float:
        if not fewest <= count <= max_count:
            return math.inf
        return balanced_span(machines, objective, total=total, largest=work[0], count=count)

    below = min(max(ideal_count(machines, objective, total=total, largest=work[0]), fewest), max_count)
    above = below + 1
    left, right = reachable(below), reachable(above)
    while left < math.inf or right < math.inf:
        if left <= right:
            yield left, below
            below -= 1
            left = reachable(below)
        else:
            yield right, above
            above += 1
            right = reachable(above)
    for count in range(max_count + 1, len(work) + 1):
        yield 0.0, count


def spread(work: Sequence[float], sizes: Sequence[int], count: int, capacity: int) -> Batches:
    """`count` batches of nearly equal work: longest first onto the least work. Empty: no room."""
    if count == 1:
        return [list(range(len(work)))] if sum(sizes) <= capacity else []
    if count >= len(work):
        return [[job] for job in range(len(work))]
    placed = _least_work(work, sizes, count, capacity) or _most_size(sizes, count, capacity)
    if not placed:
        return []
    batches: Batches = [[] for _ in range(count)]
    for job, batch in enumerate(placed):
        batches[batch].append(job)
    return [batch for batch in batches if batch]


def _least_work(work: Sequence[float], sizes: Sequence[int], count: int, capacity: int) -> list[int]:
    """Batch of each job: the one of least work that has room. Empty: no room.

    A batch without room for a job is set aside until a job is small enough for it: with sizes that do not increase,
    that is once per job at most, O((jobs + count) log count) in all.
    """
    if sizes[0] > capacity:
        return []
    heap = [(value, batch) for batch, value in enumerate(work[:count])]  # the first of each batch
    room = [capacity - size for size in sizes[:count]]
    heapq.heapify(heap)
    aside: list[tuple[int, float, int]] = []
    placed = list(range(count))
    for value, size in zip(work[count:], sizes[count:]):
        while aside and -aside[0][0] >= size:
            _, load, batch = heapq.heappop(aside)
            heapq.heappush(heap, (load, batch))
        while heap:
            load, batch = heap[0]
            if room[batch] >= size:
                break
            heapq.heappop(heap)
            heapq.heappush(aside, (-room[batch], load, batch))
        else:
            return []
        heapq.heapreplace(heap, (load + value, batch))
        room[batch] -= size
        placed.append(batch)
    return placed


def _most_size(sizes: Sequence[int], count: int, capacity: int) -> list[int]:
    """Batch of each job: the fullest that has room. Empty: no room. Jobs of one size fill a batch at once."""
    by_room = [(capacity, batch) for batch in range(count)]
    placed: list[int] = []
    while len(placed) < len(sizes):
        size = sizes[len(placed)]
        index = bisect_left(by_room, (size, -1))
        if index == len(by_room):
            return []
        room, batch = by_room.pop(index)
        while len(placed) < len(sizes) and sizes[len(placed)] == size <= room:
            placed.append(batch)
            room -= size
        insort(by_room, (room, batch))
    return placed


def improve(work: Sequence[float], sizes: Sequence[int], batches: Batches, *, capacity: int, swaps: int) -> None:
    """Shorten the longest batch by the best move or swap with one of the shortest, while one helps."""
    loads = [sum([work[job] for job in batch]) for batch in batches]
    space = [capacity - sum([sizes[job] for job in batch]) for batch in batches]
    target = max(sum(loads) / len(batches), work[0]) * (1 + CLOSE)
    work_of, size_of = np.array([*work, 0.0]), np.array([*sizes, 0])  # the last is no job, at -1
    for _ in range(swaps):
        longest = max(range(len(loads)), key=loads.__getitem__)
        load = loads[longest]
        if load <= target:
            return
        best, best_swap = load * (1 - CLOSE / 10), None
        givers = _distinct(work, sizes, batches[longest])
        for partner in heapq.nsmallest(PARTNERS, range(len(loads)), key=loads.__getitem__):
            takers = [-1, *_distinct(work, sizes, batches[partner])]
            relief = work_of[givers][:, None] - work_of[takers]
            grown = size_of[givers][:, None] - size_of[takers]
            after = np.maximum(load - relief, loads[partner] + relief)
            after[(relief <= 0) | (grown > space[partner]) | (-grown > space[longest])] = math.inf
            row, column = divmod(int(after.argmin()), len(takers))
            if after[row, column] < best:
                best = float(after[row, column])
                best_swap = partner, givers[row], takers[column], float(relief[row, column]), int(grown[row, column])
        if best_swap is None:
            return
        partner, mine, theirs, relief, grown = best_swap
        batches[longest].remove(mine)
        insort(batches[partner], mine)
        if theirs >= 0:
            batches[partner].remove(theirs)
            insort(batches[longest], theirs)
        loads[longest] -= relief
        loads[partner] += relief
        space[longest] += grown
        space[partner] -= grown


def _distinct(work: Sequence[float], sizes: Sequence[int], batch: list[int]) -> list[int]:
    """The first of the jobs of a batch that are alike."""
    firsts: dict[tuple[float, int], int] = {}
    for job in batch:
        firsts.setdefault((work[job], sizes[job]), job)
    return list(firsts.values())
