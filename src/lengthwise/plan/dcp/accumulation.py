"""Micro-batches each group accumulates in a step, so that all groups end together: DCP-inter's balance, solved exactly.

A group is some devices that run micro-batches of one bucket, each in T_i seconds. With g_i of them it works g_i T_i
seconds and waits for the slowest. The published search minimises absolute idle seconds (Eq. 3), which small steps win
whatever their shape; here the idle *share* is least, mean over the devices of 1 - g_i T_i / max_j g_j T_j.

Under a makespan C the best counts are g_i = floor(C / T_i), and some group ends exactly at C: so C is a multiple k T_j,
and trying all multiples is exact. Where the counts exceed the cap on the size of a step, they are cut to the best that
does not, a knapsack per multiple, solved only where its fractional relaxation beats what is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.errors import InputError

ROUNDING = 1e-12
"""Idle shares within this of one another are equal; the smaller step is taken."""
SIZE_UNITS = 4096
"""Most units that a cap is counted in: beyond, sizes are rounded up to larger units, so the cap holds all the same."""


@dataclass(frozen=True, kw_only=True)
class AccumulationRange:
    """How many micro-batches a group may accumulate."""

    g_min: int = 1
    """Every group accumulates at least this many."""
    g_max: int = 5
    """The slowest group accumulates at most this many, which bounds the time of a step (DCP, appendix C)."""
    every_group: bool = False
    """``g_max`` bounds every group instead (DCP, section 3.3), which leaves fast groups idle."""

    def __post_init__(self) -> None:
        if not 1 <= self.g_min <= self.g_max:
            raise InputError(f"accumulation needs 1 <= g_min <= g_max, not g_min={self.g_min} and g_max={self.g_max}")


def idle_share(times_s: ArrayLike, counts: ArrayLike, *, devices: ArrayLike | None = None) -> float:
    """Share of the device-seconds of a step in which devices wait for the slowest group.

    Args:
        times_s: [n] seconds of a micro-batch of each group.
        counts: [n] micro-batches that each group runs.
        devices: [n] devices of each group; equal if left out.
    """
    loads_s = np.asarray(times_s, dtype=np.float64) * np.asarray(counts)
    weights = None if devices is None else np.asarray(devices, dtype=np.float64)
    return float(1.0 - np.average(loads_s, weights=weights) / loads_s.max())


def accumulate(
    times_s: ArrayLike,
    limits: AccumulationRange,
    *,
    devices: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    max_size: int | None = None,
) -> np.ndarray:
    """The counts g_i with the least idle share; of equal ones, the smallest step. O(multiples * groups).

    Exact, also under ``max_size`` while that is at most ``SIZE_UNITS`` above the smallest step.

    Args:
        times_s: [n] seconds of a micro-batch of each group.
        limits: the counts allowed.
        devices: [n] devices of each group, its weight in the mean; equal if left out.
        sizes: [n] size of a micro-batch of each group, in sequences or tokens; 1 if left out.
        max_size: most of the sum of g_i sizes_i; no limit if left out.

    Raises:
        InputError: a time or a size is not positive, or g_min alone exceeds ``max_size``.
    """
    times = np.asarray(times_s, dtype=np.float64)
    weights = np.ones(len(times)) if devices is None else np.asarray(devices, dtype=np.float64)
    size = np.ones(len(times), dtype=np.int64) if sizes is None else np.asarray(sizes, dtype=np.int64)
    if not len(times) or not (times > 0).all() or not (size > 0).all() or not (weights > 0).all():
        raise InputError(f"accumulation needs positive times, sizes and devices; got {times}, {size} and {weights}")
    makespans, counts = _without_cap(times, limits)
    work = weights * times / weights.sum()
    idle, totals = 1.0 - counts @ work / makespans, counts @ size
    if max_size is None:
        return counts[_least(idle, totals)]
    smallest = limits.g_min * int(size.sum())
    if smallest > max_size:
        raise InputError(
            f"g_min={limits.g_min} micro-batches of every group hold {smallest:,}, over the cap of {max_size:,}; "
            "lower g_min, raise the cap or use smaller micro-batches"
        )
    return _under_cap(makespans, counts, work, _Cap(size=size, base=limits.g_min, spare_size=max_size - smallest))


def _without_cap(times: np.ndarray, limits: AccumulationRange) -> tuple[np.ndarray, np.ndarray]:
    """Makespans [m] that can be best, and the most micro-batches [m, n] that end by then."""
    longest = times.max()
    up_to = np.full(len(times), limits.g_max)
    if not limits.every_group:
        up_to = _whole(limits.g_max * longest / times)
    multiples = np.unique(
        np.concatenate([np.arange(1, max_count + 1) * time_s for time_s, max_count in zip(times, up_to)])
    )
    multiples = multiples[multiples >= limits.g_min * longest * (1 - ROUNDING)]
    counts = np.minimum(_whole(multiples[:, None] / times), up_to)
    return (counts * times).max(axis=1), counts


def _whole(ratios: np.ndarray) -> np.ndarray:
    """Rounded down, but for what only rounding keeps below an integer."""
    return np.floor(ratios * (1 + ROUNDING)).astype(np.int64)


def _least(idle: np.ndarray, totals: np.ndarray) -> int:
    """The entry with the least idle share; of equal ones, the one with the smallest total."""
    equal = np.flatnonzero(idle <= idle.min() + ROUNDING)
    return int(equal[np.argmin(totals[equal])])


@dataclass(frozen=True, kw_only=True)
class _Cap:
    """What the counts beyond ``base`` of each group may hold together."""

    size: np.ndarray
    base: int
    spare_size: int


def _under_cap(makespans: np.ndarray, counts: np.ndarray, work: np.ndarray, cap: _Cap) -> np.ndarray:
    """The best counts under the cap, for the makespan where they are best."""
    extra = counts - cap.base
    order = np.argsort(-work / cap.size, kind="stable")
    before = np.cumsum(extra[:, order] * cap.size[order], axis=1) - extra[:, order] * cap.size[order]
    relaxed_counts = np.empty_like(extra, dtype=np.float64)
    relaxed_counts[:, order] = np.clip((cap.spare_size - before) / cap.size[order], 0, extra[:, order])
    relaxed = 1.0 - (relaxed_counts + cap.base) @ work / makespans  # the least idle share with counts in fractions
    best = _whole(relaxed_counts) + cap.base
    rounded = 1.0 - best @ work / makespans
    choice = _least(rounded, best @ cap.size)
    chosen, idle, total = best[choice], float(rounded[choice]), int(best[choice] @ cap.size)
    over = extra @ cap.size > cap.spare_size
    for number in np.argsort(relaxed, kind="stable").tolist():
        if relaxed[number] > idle + ROUNDING:
            break
        if not over[number]:
            continue
        exact_counts = knapsack(work.tolist(), cap.size.tolist(), extra[number].tolist(), cap.spare_size) + cap.base
        exact_idle, exact_total = float(1.0 - exact_counts @ work / makespans[number]), int(exact_counts @ cap.size)
        if exact_idle < idle - ROUNDING or (exact_idle <= idle + ROUNDING and exact_total < total):
            chosen, idle, total = exact_counts, min(idle, exact_idle), exact_total
    return chosen


def knapsack(values: Sequence[float], sizes: Sequence[int], max_counts: Sequence[int], capacity: int) -> np.ndarray:
    """Solve a bounded knapsack: counts, at most ``max_counts``, of greatest value within ``capacity``; ties take least.

    By dynamic programming over the capacity, items in bundles of 1, 2, 4, ... of a candidate.
    """
    unit = max(1, -(-capacity // SIZE_UNITS))
    room = capacity // unit
    value = np.zeros(room + 1)
    taken: list[tuple[int, int, int, np.ndarray]] = []
    for item, (item_value, size, left) in enumerate(zip(values, sizes, max_counts)):
        size, left, bundle = -(-size // unit), min(left, capacity // size), 1
        while left > 0:
            bundle = min(bundle, left)
            if bundle * size > room:
                break
            more = value[: room + 1 - bundle * size] + bundle * item_value
            better = more > value[bundle * size :] + ROUNDING * bundle * item_value
            value[bundle * size :] = np.where(better, more, value[bundle * size :])
            taken.append((item, bundle, bundle * size, better))
            left, bundle = left - bundle, 2 * bundle
    counts = np.zeros(len(values), dtype=np.int64)
    room_used = int(np.argmax(value >= value.max() * (1 - ROUNDING)))
    for item, bundle, size, better in reversed(taken):
        if room_used >= size and better[room_used - size]:
            counts[item] += bundle
            room_used -= size
    return counts
