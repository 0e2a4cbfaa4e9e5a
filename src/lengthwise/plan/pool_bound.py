"""A bound that no plan of a pool's schemes beats: any strategy, heterogeneous or switched within the step, any packing.

Say a step takes T at most. Under scheme k it has T - u_k left for micro-batches, since the update takes at least u_k. A
pipeline of S_k stages whose longest sequence takes x holds work of at most T - u_k - (S_k - 1) x. So one of work w
takes at least N_k w / (T - u_k - (S_k - 1) w) of the cluster's N devices under the scheme of N_k devices, and all
sequences together, each under the scheme where that is least, must not take more than N. Phases of a step only shorten
what each has left. Where T - u_k does not suffice for a sequence alone, the scheme is out. This is the certificate of
``plan.solve.shop`` with one price per device, whatever tiles them, and Hydraulis' Eq. (4) with fractional counts where
no scheme has several stages.

Work includes a sequence's share of the overhead of the fullest pack its scheme allows.
"""

from collections.abc import Sequence

import numpy as np

from lengthwise.core.scheme import homogeneous
from lengthwise.plan.kind import Kind
from lengthwise.plan.problem import PricedBatch, Problem

EXACT_TO = 512
"""Tokens up to which every length has its own entry."""
STEP = 1.005
"""Ratio of neighbouring entries beyond; a sequence counts as the one below."""
UPDATE_DIGITS = 2
"""Leading digits by which update times are told apart."""
TOLERANCE = 1e-4
"""Relative width at which the search for the largest refuted time ends."""
MARGIN = 1e-9
"""Of sums of floats, on the side that keeps the bound valid."""


class PoolBound:
    """The bound of one pool. Schemes alike in devices, stages and update are tabulated over lengths as one, once."""

    def __init__(self, problem: Problem, kinds: Sequence[Kind]) -> None:
        self._num_devices = problem.num_devices
        self._grid = _grid(min(max(kind.max_tokens for kind in kinds), problem.max_length))
        groups: dict[tuple[int, int, float], list[Kind]] = {}
        for kind in kinds:
            groups.setdefault((kind.num_devices, kind.num_stages, _update_s(problem, kind)), []).append(kind)
        self._updates_s = np.array([[update_s] for _, _, update_s in groups])
        self._later = np.array([[stages - 1.0] for _, stages, _ in groups])
        shape = len(groups), len(self._grid)
        self._device_s, self._alone_s = np.full(shape, np.inf), np.full(shape, np.inf)
        for row, held in enumerate(groups.values()):
            for kind in held:
                self._add(kind, row, per_sequence=problem.overhead_per_sequence)

    def _add(self, kind: Kind, row: int, *, per_sequence: bool) -> None:
        end = int(np.searchsorted(self._grid, kind.max_tokens, side="right"))
        grid = self._grid[:end]
        times_s, overhead_s = kind.times_s(grid), kind.overhead_s
        share_s = overhead_s if per_sequence else overhead_s * grid / kind.max_tokens
        for table, values in (
            (self._device_s, kind.num_devices * (times_s + share_s)),
            (self._alone_s, times_s + overhead_s),
        ):
            np.minimum(table[row, :end], values, out=table[row, :end])

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches take at least, pipelines never filling or draining; the cheapest to tell."""
        at = self._at(priced.lengths)
        alone_s = ((self._later + 1) * self._alone_s[:, at]).min(axis=0)
        return max(float(self._device_s[:, at].min(axis=0).sum()) / self._num_devices, float(alone_s.max()))

    def __call__(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches of a step take at least."""
        return self.of(priced.lengths)

    def of(self, lengths: np.ndarray) -> float:
        """The same for sequences of these lengths."""
        return self._largest_refuted_s(lengths, np.zeros_like(self._updates_s))

    def step_s(self, priced: PricedBatch) -> float:
        """Seconds that the whole step takes at least, its update included."""
        return self._largest_refuted_s(priced.lengths, self._updates_s)

    def _at(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._grid, lengths, side="right") - 1

    def _largest_refuted_s(self, lengths: np.ndarray, updates_s: np.ndarray) -> float:
        at, counts = np.unique(self._at(lengths), return_counts=True)
        device_s, alone_s = self._device_s[:, at], self._alone_s[:, at]
        later_s = np.multiply(self._later, alone_s, out=np.zeros_like(alone_s), where=self._later > 0)  # 0 x inf is 0
        taken_s = updates_s + later_s

        def is_refuted(time_s: float) -> bool:
            left_s = time_s - taken_s
            with np.errstate(divide="ignore", invalid="ignore"):
                devices = np.where(left_s >= alone_s * (1 - MARGIN), device_s / left_s, np.inf)
            return float(devices.min(axis=0) @ counts) > self._num_devices * (1 + MARGIN)

        low = float((taken_s + alone_s).min(axis=0).max()) * (1 - MARGIN)
        if not is_refuted(low):
            return low
        high = 2 * low
        while is_refuted(high):
            low, high = high, 2 * high
        while high > low * (1 + TOLERANCE):
            middle = (low + high) / 2
            low, high = (middle, high) if is_refuted(middle) else (low, middle)
        return low


def _update_s(problem: Problem, kind: Kind) -> float:
    """Seconds of an update under equal pipelines, rounded down; 0, which bounds all, where they do not tile."""
    if problem.num_devices % kind.num_devices:
        return 0.0
    update_s = problem.cost.update_s(homogeneous(kind.scheme, problem.num_devices))
    if update_s <= 0.0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(update_s)) + 1 - UPDATE_DIGITS)
    return float(min(update_s, np.floor(update_s / unit) * unit))


def _grid(longest: int) -> np.ndarray:
    exact = np.arange(1, min(longest, EXACT_TO) + 1)
    if longest <= EXACT_TO:
        return exact
    count = int(np.ceil(np.log(longest / EXACT_TO) / np.log(STEP))) + 1
    return np.unique(np.concatenate([exact, np.geomspace(EXACT_TO, longest, count).astype(np.int64)]))
