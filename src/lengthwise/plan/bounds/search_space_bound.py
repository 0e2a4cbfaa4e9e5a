"""A lower bound on every plan of a search space: any strategy, heterogeneous or switched within the step, any packing.

Say a step takes T at most. Under scheme k it has T - u_k left for micro-batches, since the update takes at least u_k. A
pipeline of S_k stages whose longest sequence takes x holds work of at most T - u_k - (S_k - 1) x. So one of work w
takes at least N_k w / (T - u_k - (S_k - 1) w) of the cluster's N devices under the scheme of N_k devices, and all
sequences together, each under the scheme where that is least, must not take more than N. Phases of a step only shorten
what each has left. Where T - u_k does not suffice for a sequence alone, the scheme is out. This is the certificate of
``plan.solve.shop`` with one price per device, whatever tiles them, and Hydraulis' Eq. (4) with fractional counts where
no scheme has several stages.

That lets every sequence pay for its own bubble alone. But the longest, of work m, runs on a pipeline of some scheme h,
whose bubble nobody can use: it takes N_h S_h m device-seconds. Others may take the room that its pipeline has until T,
at N_h w each. No scheme of the step then has more than T - u_h. So T is refuted if it is for every h.

Work includes a sequence's share of the overhead of the fullest pack its scheme allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.core.pipeline_config import homogeneous
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

EXACT_TO = 512
"""Tokens up to which every length has its own entry."""
STEP = 1.005
"""Ratio of neighbouring entries beyond; a sequence counts as the one below."""
UPDATE_DIGITS = 2
"""Leading digits by which update times are told apart."""
TOLERANCE = 1e-4
"""Relative width at which the search for the largest refuted time ends."""
MARGIN = 1e-9
"""Relative margin of sums of floats, on the side that keeps the bound valid."""


class SearchSpaceBound:
    """The lower bound of one search space, tabulated over lengths for schemes alike in devices, stages and update."""

    def __init__(self, problem: PlanningProblem, candidates: Sequence[Candidate]) -> None:
        self._num_devices = problem.num_devices
        self._grid = _grid(min(max(candidate.max_tokens for candidate in candidates), problem.max_length))
        groups: dict[tuple[int, int, float], list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault((candidate.num_devices, candidate.num_stages, _update_s(problem, candidate)), []).append(
                candidate
            )
        self._updates_s = np.array([[update_s] for _, _, update_s in groups])
        self._devices = np.array([devices for devices, _, _ in groups])
        self._later = np.array([[stages - 1.0] for _, stages, _ in groups])
        shape = len(groups), len(self._grid)
        self._device_s, self._alone_s = np.full(shape, np.inf), np.full(shape, np.inf)
        for row, members in enumerate(groups.values()):
            for candidate in members:
                self._add(candidate, row, per_sequence=problem.overhead_per_sequence)

    def _add(self, candidate: Candidate, row: int, *, per_sequence: bool) -> None:
        end = int(np.searchsorted(self._grid, candidate.max_tokens, side="right"))
        grid = self._grid[:end]
        times_s, overhead_s = candidate.times_s(grid), candidate.overhead_s
        share_s = overhead_s if per_sequence else overhead_s * grid / candidate.max_tokens
        for table, values in (
            (self._device_s, candidate.num_devices * (times_s + share_s)),
            (self._alone_s, times_s + overhead_s),
        ):
            np.minimum(table[row, :end], values, out=table[row, :end])

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches take at least, pipelines never filling or draining; the cheapest bound."""
        columns = self._at(priced.lengths)
        alone_s = ((self._later + 1) * self._alone_s[:, columns]).min(axis=0)
        return max(float(self._device_s[:, columns].min(axis=0).sum()) / self._num_devices, float(alone_s.max()))

    def __call__(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches of a step take at least."""
        return self._sequences(priced.lengths, np.zeros_like(self._updates_s)).bound_s()

    def of(self, lengths: np.ndarray) -> float:
        """Bound the seconds of sequences of ``lengths``, the longest like any other: lower, but faster to compute."""
        return self._sequences(lengths, np.zeros_like(self._updates_s)).even_bound_s()

    def step_s(self, priced: PricedBatch) -> float:
        """Seconds that the whole step takes at least, its update included."""
        return self._sequences(priced.lengths, self._updates_s).bound_s()

    def _at(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._grid, lengths, side="right") - 1

    def _sequences(self, lengths: np.ndarray, updates_s: np.ndarray) -> "_Sequences":
        columns, counts = np.unique(self._at(lengths), return_counts=True)
        return _Sequences(
            num_devices=self._num_devices,
            counts=counts.astype(np.float64),
            devices=self._devices,
            later=self._later,
            updates_s=updates_s,
            device_s=self._device_s[:, columns],
            alone_s=self._alone_s[:, columns],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sequences:
    """The sequences of a step in C classes of length under G groups of schemes; the longest comes last."""

    num_devices: int
    counts: np.ndarray
    """[C]"""
    devices: np.ndarray
    """[G] of a pipeline."""
    later: np.ndarray
    """[G, 1] stages after the first."""
    updates_s: np.ndarray
    """[G, 1]"""
    device_s: np.ndarray
    """[G, C] device-seconds per stage, with a share of the overhead; inf where it does not fit."""
    alone_s: np.ndarray
    """[G, C] seconds per stage of a micro-batch of its own."""

    @cached_property
    def later_s(self) -> np.ndarray:
        """[G, C] bubble of a pipeline whose longest it is."""
        return np.multiply(self.later, self.alone_s, out=np.zeros_like(self.alone_s), where=self.later > 0)  # not 0 inf

    def even_bound_s(self) -> float:
        """The largest refuted time, each sequence paying for its own bubble."""
        low_s = self._floor_s(self.updates_s)
        return _largest_refuted_s(lambda time_s: self._even_devices(time_s) > self._most_devices, low_s)

    def bound_s(self) -> float:
        """The largest refuted time if no other sequence uses the bubble of the longest."""
        even_s, best_s = self.even_bound_s(), np.inf
        for host in np.flatnonzero(np.isfinite(self.alone_s[:, -1])).tolist():
            alone_s = float(self.updates_s[host, 0] + self.later_s[host, -1] + self.alone_s[host, -1])
            low_s = max(even_s, alone_s, self._floor_s(self._updates_with(host)))

            def is_refuted(time_s: float, host: int = host) -> bool:
                return self._hosted_devices(time_s, host) > self._most_devices

            if low_s < best_s and not (best_s < np.inf and is_refuted(best_s)):
                best_s = _largest_refuted_s(is_refuted, low_s, best_s)
        return best_s if best_s < np.inf else even_s

    @property
    def _most_devices(self) -> float:
        return self.num_devices * (1 + MARGIN)

    def _updates_with(self, host: int) -> np.ndarray:
        return np.maximum(self.updates_s, self.updates_s[host])

    def _floor_s(self, updates_s: np.ndarray) -> float:
        """Seconds of the sequence that takes longest alone."""
        return float((updates_s + self.later_s + self.alone_s).min(axis=0).max()) * (1 - MARGIN)

    def _least_devices(self, time_s: float, updates_s: np.ndarray) -> np.ndarray:
        """[C] devices that a sequence of each length takes at least; inf where there is no time for it."""
        left_s = time_s - updates_s - self.later_s
        with np.errstate(divide="ignore", invalid="ignore"):
            devices = np.where(left_s >= self.alone_s * (1 - MARGIN), self.device_s / left_s, np.inf)
        least: np.ndarray = devices.min(axis=0)
        return least

    def _even_devices(self, time_s: float) -> float:
        return float(self._least_devices(time_s, self.updates_s) @ self.counts)

    def _hosted_devices(self, time_s: float, host: int) -> float:
        """Devices that all sequences take at least if the longest runs on a pipeline of group ``host``.

        What shares its pipeline saves most per second of its room: a fractional knapsack.
        """
        left_s = time_s - float(self.updates_s[host, 0])
        work_s = self.device_s[host] / self.devices[host]
        host_s = work_s[-1] + self.later_s[host, -1]
        elsewhere = np.minimum(self._least_devices(time_s, self._updates_with(host)), 2.0 * self.num_devices)
        others = self.counts - (np.arange(len(self.counts)) == len(self.counts) - 1)
        beside = self.device_s[host] / left_s
        total = float(elsewhere @ others) + float(self.devices[host] * host_s / left_s)
        fitting = np.isfinite(work_s) & (others > 0) & (elsewhere > beside)
        saved, needed_s = ((elsewhere - beside) * others)[fitting], (work_s * others)[fitting]
        order = np.argsort(-saved / needed_s, kind="stable")
        ends_s = np.cumsum(needed_s[order])
        parts = np.clip((left_s - host_s - ends_s) / needed_s[order] + 1, 0.0, 1.0)
        return total - float(saved[order] @ parts)


def _largest_refuted_s(is_refuted: Callable[[float], bool], low_s: float, high_s: float = np.inf) -> float:
    """About the largest time that is refuted, or ``low_s``; ``high_s`` is not refuted."""
    if not is_refuted(low_s):
        return low_s
    while high_s == np.inf:
        low_s, high_s = (2 * low_s, np.inf) if is_refuted(2 * low_s) else (low_s, 2 * low_s)
    while high_s > low_s * (1 + TOLERANCE):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if is_refuted(middle_s) else (low_s, middle_s)
    return low_s


def _update_s(problem: PlanningProblem, candidate: Candidate) -> float:
    """Seconds of an update under equal pipelines, rounded down; 0, which bounds all, where they do not tile."""
    if problem.num_devices % candidate.num_devices:
        return 0.0
    update_s = problem.cost.update_s(homogeneous(candidate.scheme, problem.num_devices))
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
