"""A lower bound on plans of one phase or of two that takes sequences whole and phases as they are.

``SearchSpaceBound`` lets every sequence choose a scheme by itself and pay for its own share of a pipeline: parts of
phases are free, and a pipeline's devices may be fractions of it. Here a plan is a set of columns (``phase_columns``),
pipelines of whole sequences, in a phase of D seconds or in two of D_1 >= D_2, whose devices come to no more than N in
each. Of all plans that take T or less, D_1 is between (T - U) / 2 and T - U, and D_2 at most T - U - D_1, where U is
what their update takes at least. D_1 is cut into intervals [a, b], in each of which columns may take b in the one
phase and T - U - a in the other. The linear program of how many of each column there are then has no solution, or the
interval is halved; its columns are those that prices ask for. What proves it are prices alone: if all sequences are
worth more than N devices of each phase can be, at the most that a column is worth per device, no such plan computes
them.

That is asked for every U, as in ``SearchSpaceBound``, updates alike at once. How many pipelines of a group there are
need not come out whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog

from lengthwise.plan.bounds.micro_batch_room import MARGIN
from lengthwise.plan.bounds.phase_columns import PhaseColumns, PipelineColumn
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.bounds.step_sequences import StepSequences
from lengthwise.plan.space.problem import PricedBatch

MOST_PHASES = 2
"""Of plans that are bounded."""
TOLERANCE = 2e-3
"""Relative width at which the search for the largest refuted time ends."""
FIRST_INTERVALS, NARROWEST = 12, 1 / 256
"""Into which the seconds of the longer phase are cut at first, and the share of both phases that is not halved."""
MOST_INTERVALS = 400
"""That are looked at."""
MOST_ROUNDS = 60
"""Of prices, in each of which columns join the linear program."""
NEW_SHARE = 0.7
"""Of the latest prices, the rest being those that proved the most so far; they jump less."""
REMEMBERED = 4
"""Prices that proved something, which are tried first."""


def certified_s(bound: SearchSpaceBound, priced: PricedBatch, planned_s: float) -> float:
    """Seconds that no plan of one phase or two is faster than, its update included, and no more than ``planned_s``.

    It takes seconds to minutes.

    Args:
        bound: of the search space.
        priced: the step.
        planned_s: what some plan takes.
    """
    low_s, high_s = min(planned_s, bound.step_s(priced)), planned_s * (1 - TOLERANCE / 2)
    cover = PhaseCover(bound.sequences(priced.bounding_lengths))
    for num_phases in range(1, MOST_PHASES + 1):
        if high_s > low_s * (1 + TOLERANCE):
            high_s = cover.largest_refuted_s(low_s, high_s, num_phases)
    return high_s


class PhaseCover:
    """The linear programs of one step."""

    def __init__(self, sequences: StepSequences) -> None:
        """``sequences``: of the step, under all groups of schemes."""
        self._sequences = sequences.without_dominated(by_passes=True)
        self._levels_s: list[float] = np.unique(self._sequences.updates_s).tolist()
        self._under: dict[float, StepSequences] = {}
        self._proofs: list[np.ndarray] = []

    def largest_refuted_s(self, low_s: float, high_s: float, num_phases: int) -> float:
        """About the largest time up to ``high_s`` that is refuted of plans of so many phases; ``low_s`` at least."""
        if self.is_refuted(high_s, num_phases):
            return high_s
        while high_s > low_s * (1 + TOLERANCE):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (middle_s, high_s) if self.is_refuted(middle_s, num_phases) else (low_s, middle_s)
        return low_s

    def is_refuted(self, time_s: float, num_phases: int) -> bool:
        """Whether no plan of so many phases takes ``time_s`` or less; of two, if that is known of one."""
        levels = [u for u in self._levels_s if u + self._sequences.floor_under_s(u) < time_s]
        return not levels or self._is_level_refuted(time_s, levels, num_phases)

    def _is_level_refuted(self, time_s: float, levels: Sequence[float], num_phases: int) -> bool:
        """Whether no plan does whose update is among ``levels``, ascending."""
        left_s, sequences = time_s - levels[0], self._sequences_under(levels[-1])
        if sequences.bound_s(left_s) >= left_s:
            return True
        if num_phases == 1:
            is_refuted = self._cannot_cover([PhaseColumns(sequences, left_s)])
        else:
            is_refuted = self._cannot_cover_in_two(sequences, left_s)
        if is_refuted or len(levels) == 1:
            return is_refuted
        half = len(levels) // 2
        parts = levels[:half], levels[half:]
        return all(self._is_level_refuted(time_s, part, num_phases) for part in parts)

    def _sequences_under(self, update_s: float) -> StepSequences:
        if update_s not in self._under:
            under = self._sequences.under(update_s)
            equal = replace(under, updates_s=np.zeros(len(under.updates_s)))
            self._under[update_s] = equal.without_dominated(by_passes=True)
        return self._under[update_s]

    def _cannot_cover_in_two(self, sequences: StepSequences, time_s: float) -> bool:
        """Whether no two phases that take ``time_s`` together compute all sequences; that one does not is known."""
        shortest_s = float(sequences.costs.alone_s.min()) * (1 - MARGIN)
        edges = np.linspace(time_s / 2, time_s - shortest_s, FIRST_INTERVALS + 1).tolist()
        intervals = list(pairwise(edges)) if edges[-1] > edges[0] else []
        for _ in range(MOST_INTERVALS):
            if not intervals:
                return True
            least_s, most_s = intervals.pop()
            phases = [PhaseColumns(sequences, each_s) for each_s in (most_s, time_s - least_s)]
            if self._cannot_cover(phases):
                continue
            if most_s - least_s < NARROWEST * time_s:
                return False
            middle_s = (least_s + most_s) / 2
            intervals += [(least_s, middle_s), (middle_s, most_s)]
        return False

    def _cannot_cover(self, phases: Sequence[PhaseColumns]) -> bool:
        """Whether columns of these phases, on N devices each, cannot have all sequences."""
        fits = np.logical_or.reduce([phase.fits.any(axis=0) for phase in phases])
        if not fits.all():
            return True
        for values in self._proofs:
            if self._share(values, [phase.dearest(values)[0] for phase in phases]) > 1 + MARGIN:
                return True
        program = _Program(phases, self._sequences.num_devices)
        best, proven = None, 0.0
        for _ in range(MOST_ROUNDS):
            share, values = program.solved()
            if share <= 1:
                return False
            added = 0
            tried = [values] if best is None else [NEW_SHARE * values + (1 - NEW_SHARE) * best, values]
            for prices in tried:
                dearest = [phase.dearest(prices) for phase in phases]
                if (now := self._share(prices, [worth for worth, _ in dearest])) > proven:
                    best, proven = prices, now
                if proven > 1 + MARGIN:
                    self._proofs = [prices, *self._proofs][:REMEMBERED]
                    return True
                added = sum(program.add(number, columns) for number, (_, columns) in enumerate(dearest))
                if added:
                    break
            if not added:
                return False
        return False

    def _share(self, values: np.ndarray, worths: Sequence[float]) -> float:
        """How many times what N devices of each phase can be worth all sequences are."""
        can_be = self._sequences.num_devices * sum(worths)
        return float(values @ self._sequences.counts) / can_be if can_be > 0 else np.inf


class _Program:
    """The linear program of the least share of the cluster, in each phase, on which columns have all sequences."""

    def __init__(self, phases: Sequence[PhaseColumns], num_devices: int) -> None:
        self._phases, self._num_devices, self._counts = phases, num_devices, phases[0].counts
        self._columns: list[np.ndarray] = []
        self._prices = np.zeros(len(self._counts) + len(phases))
        for number, phase in enumerate(phases):
            self._columns += [self._row(number, column) for column in phase.alone()]

    def _row(self, number: int, column: PipelineColumn) -> np.ndarray:
        """Sequences of each class, and devices in each phase."""
        used = np.zeros(len(self._phases))
        used[number] = self._phases[number].devices[column.group]
        return np.append(column.counts, used)

    def add(self, number: int, columns: Sequence[PipelineColumn]) -> int:
        """How many columns of a phase are worth more than their devices at the latest prices; these are added."""
        rows = [self._row(number, column) for column in columns]
        signs = np.append(np.ones(len(self._counts)), -np.ones(len(self._phases)))
        dear = [row for row in rows if (row * signs) @ self._prices > 1e-9]
        self._columns += dear
        return len(dear)

    def solved(self) -> tuple[float, np.ndarray]:
        """The least share of the cluster, and what a sequence of each class is worth of it."""
        matrix, num_classes, num_phases = np.array(self._columns).T, len(self._counts), len(self._phases)
        matrix[:num_classes] *= -1
        shares = np.append(np.zeros(num_classes), np.full(num_phases, -float(self._num_devices)))
        limits = np.append(-self._counts, np.zeros(num_phases))
        cost = np.append(np.zeros(matrix.shape[1]), 1.0)
        result = linprog(cost, A_ub=np.column_stack([matrix, shares]), b_ub=limits, method="highs")
        self._prices = np.maximum(0.0, -result.ineqlin.marginals)
        return float(result.fun), self._prices[:num_classes]
