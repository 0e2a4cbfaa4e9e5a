"""Cutting a line into a few segments, each of one kind, so that their costs and the changes of kind cost least."""

import numpy as np

Segment = tuple[int, int, int]
"""Kind, first point, last point."""


def best_segmentations(
    cost: np.ndarray, change: np.ndarray, weight: np.ndarray, *, max_segments: int
) -> list[tuple[float, tuple[Segment, ...]]]:
    """For each number of segments and each kind of the last one, the cheapest way to cut the line; cheapest first.

    K kinds, P points; the line runs from point 0 to point P - 1. O(max_segments K^2 P^2).

    Args:
        cost: [K, P, P] of a segment from point i to point j > i; inf where it is not allowed.
        change: [K, K] from the kind of a segment to that of the next; inf where they may not be neighbours.
        weight: [P, P] by which ``change`` is multiplied before a segment from i to j.
        max_segments: segments at most.
    """
    num_kinds, num_points, _ = cost.shape
    before = np.full((num_kinds, num_points), np.inf)
    allowed = np.isfinite(change)
    price, barred = np.where(allowed, change, 0.0), np.where(allowed, 0.0, np.inf)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    segmentations = []
    for number in range(max_segments):
        best = np.full((num_kinds, num_points), np.inf)
        start = np.zeros((num_kinds, num_points), dtype=int)
        previous = np.full((num_kinds, num_points), -1)
        for end in range(1, num_points):
            if number == 0:
                best[:, end] = cost[:, 0, end]
                continue
            for begin in range(1, end):
                entered = before[:, begin, None] + price * weight[begin, end] + barred  # [previous kind, kind]
                origin = entered.argmin(axis=0)
                value = entered[origin, np.arange(num_kinds)] + cost[:, begin, end]
                better = value < best[:, end]
                best[better, end], start[better, end], previous[better, end] = value[better], begin, origin[better]
        steps.append((start, previous))
        segmentations += [
            (float(best[kind, -1]), _trace(steps, kind, num_points - 1))
            for kind in range(num_kinds)
            if best[kind, -1] < np.inf
        ]
        before = best
    return sorted(segmentations)


def _trace(steps: list[tuple[np.ndarray, np.ndarray]], kind: int, end: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for start, previous in reversed(steps):
        segments.append((kind, int(start[kind, end]), end))
        kind, end = int(previous[kind, end]), int(start[kind, end])
    return tuple(reversed(segments))
