"""Eq. (4) of Hydraulis with whole pipelines, for every longest length at once, by a parametric search on the time.

Within a time t, the fewest devices that process all sequences up to length l are

    g_t(l) = min over candidates k that hold l, and over l0 < l, of  g_t(l0) + N_k ceil(W_k(l0, l] / t_k(l)),

where W_k(l0, l] is the work of the sequences in between. As printed, t_k = t. That lets a pipeline finish in the time
of its mean stage, and one sequence be split over all pipelines of a candidate. With the bubble,
t_k(l) = t - (stages - 1) (T_k(l) + c_k), and a candidate holds l only if T_k(l) + c_k passes all its stages within t.
The number of devices of the cluster enters only where the search ends, so the cost does not depend on it.

L length limits, K candidates, C classes of length. Here classes count from the shortest.
"""

from dataclasses import dataclass

import numpy as np

from lengthwise.plan.heterogeneous.propose.workload import Workload

TOLERANCE = 4e-3
"""Relative width at which the search for the least time ends."""
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegerStrategy:
    """The least time in which the average step's sequences up to a length are processed, and by what."""

    max_length: int
    time_s: float
    counts: np.ndarray
    """[K] pipelines of each candidate; they may leave devices over."""


def integer_strategies(
    workload: Workload,
    *,
    bubble: bool = True,
    longest: np.ndarray | None = None,
    tolerance: float = TOLERANCE,
) -> list[IntegerStrategy]:
    """Solve for one strategy per class of length, the longest first; none for lengths that no candidate holds.

    Args:
        workload: the steps; their average is what counts.
        bubble: count the stages that a pipeline fills and drains, and that a sequence cannot be split.
        longest: only the classes that hold these lengths, if given.
        tolerance: relative width at which the search for the time ends.
    """
    table = _Table(workload, bubble=bubble)
    classes = np.flatnonzero(table.is_possible)
    if longest is not None:
        classes = np.intersect1d(classes, np.searchsorted(workload.longest[::-1], longest))
    if not len(classes):
        return []
    low = table.floors_s[classes]
    high = low.copy()
    feasible = np.zeros(len(classes), dtype=bool)
    while not feasible.all():
        low = np.where(feasible, low, high)
        high = np.where(feasible, high, high * 1.5)
        feasible |= table.devices(high, classes) <= workload.num_devices
    while (high > low * (1 + tolerance)).any():
        middle = (low + high) / 2
        meets = table.devices(middle, classes) <= workload.num_devices
        low, high = np.where(meets, low, middle), np.where(meets, middle, high)
    counts = table.strategies(high, classes)
    return [
        IntegerStrategy(
            max_length=int(workload.longest[::-1][class_index]), time_s=float(time_s), counts=candidate_counts
        )
        for class_index, time_s, candidate_counts in zip(classes[::-1], high[::-1], counts[::-1])
    ]


class _Table:
    """The recursion for many times at once."""

    def __init__(self, workload: Workload, *, bubble: bool) -> None:
        self.workload = workload
        charged_s = workload.charged_s[:, ::-1]
        self.fits = np.isfinite(charged_s) & (workload.devices <= workload.num_devices)[:, None]
        work_s = np.where(self.fits, charged_s, 0.0) * workload.mean[::-1]
        self.done_s = np.concatenate([np.zeros((len(work_s), 1)), np.cumsum(work_s, axis=1)], axis=1)
        single_s = np.where(self.fits, workload.work_s[:, ::-1] + workload.setup_s[:, None], 0.0) * bubble
        self.bubble_s = single_s * (workload.stages[:, None] - 1)
        self.alone_s = single_s * workload.stages[:, None]

    @property
    def is_possible(self) -> np.ndarray:
        """[C] whether some candidate holds the class."""
        fits_any: np.ndarray = self.fits.any(axis=0)
        return fits_any

    @property
    def floors_s(self) -> np.ndarray:
        """[C] times below the least ones for all sequences up to each class."""
        device_s = np.where(self.fits, self.workload.charged_s[:, ::-1], np.inf) * self.workload.devices[:, None]
        sums_s = np.cumsum(device_s.min(axis=0) * self.workload.mean[::-1]) / self.workload.num_devices
        alone_s = np.where(self.fits, self.alone_s, np.inf).min(axis=0)
        floors_s: np.ndarray = np.maximum(sums_s, np.maximum.accumulate(alone_s)) * (1 - ROUNDING)
        return floors_s

    def devices(self, times_s: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """[L] fewest devices for all sequences up to class ``classes[i]`` in ``times_s[i]``; inf if none suffice."""
        fewest, _, _ = self._solve(times_s, int(classes.max()) + 1)
        num_devices: np.ndarray = fewest[np.arange(len(classes)), classes + 1]
        return num_devices

    def strategies(self, times_s: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """[L, K] pipelines of each candidate that need the fewest devices."""
        _, candidates, starts = self._solve(times_s, int(classes.max()) + 1)
        counts = np.zeros((len(classes), len(self.done_s)), dtype=np.int64)
        for row, last in enumerate(classes.tolist()):
            end = last + 1
            while end:
                candidate, start = int(candidates[row, end]), int(starts[row, end])
                counts[row, candidate] += int(self._pipelines(times_s[row : row + 1], end)[0, candidate, start])
                end = start
        return counts

    def _solve(self, times_s: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[L, C + 1] fewest devices up to each class, the candidate of the last interval, the class where it starts."""
        fewest = np.full((len(times_s), num_classes + 1), np.inf)
        fewest[:, 0] = 0.0
        candidates, starts = np.zeros(fewest.shape, dtype=np.int64), np.zeros(fewest.shape, dtype=np.int64)
        rows = np.arange(len(times_s))
        for end in range(1, num_classes + 1):
            needed = self._pipelines(times_s, end) * self.workload.devices[:, None] + fewest[:, None, :end]
            best = needed.reshape(len(times_s), -1).argmin(axis=1)
            candidates[:, end], starts[:, end] = np.divmod(best, end)
            fewest[:, end] = needed[rows, candidates[:, end], starts[:, end]]
        return fewest, candidates, starts

    def _pipelines(self, times_s: np.ndarray, end: int) -> np.ndarray:
        """[L, K, end] pipelines of each candidate for the classes from each start up to ``end``; inf where late."""
        work_s = self.done_s[:, end, None] - self.done_s[:, :end]
        room_s = times_s[:, None] - self.bubble_s[:, end - 1]
        late = ~self.fits[:, end - 1] | (self.alone_s[:, end - 1] > times_s[:, None] * (1 + ROUNDING)) | (room_s <= 0)
        pipelines = np.ceil(work_s / np.where(late, 1.0, room_s)[:, :, None] * (1 - ROUNDING))
        return np.where(late[:, :, None], np.inf, np.maximum(pipelines, 1.0))
