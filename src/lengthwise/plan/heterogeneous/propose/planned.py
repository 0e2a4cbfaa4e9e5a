"""What steps take under a strategy when they are really planned."""

from collections.abc import Sequence

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate, tile_of
from lengthwise.plan.heterogeneous.two_stage_assignment import PlacedStrategy
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

MOST_PLANNED = 50_000
"""Sequences of a step beyond which its bound stands for its plan: with so many, plans come within some permil of it."""


def pack_tokens_of(candidate: ProposedCandidate) -> int:
    """Most tokens of a micro-batch of several sequences."""
    return tile_of(candidate, 1).candidate.max_tokens


def price_steps(problem: PlanningProblem, steps: Sequence[np.ndarray]) -> list[PricedBatch]:
    """The steps of these lengths, with nothing known of them yet."""
    return [
        PricedBatch(problem, GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist())))
        for step, lengths in enumerate(steps)
    ]


class PlannedSteps:
    """Some steps, planned under one strategy after another, each once."""

    def __init__(self, problem: PlanningProblem, priced: Sequence[PricedBatch]) -> None:
        """``priced``: the steps; what others found of them is not found again."""
        self.problem, self._priced = problem, priced
        self._under: dict[frozenset[tuple[ProposedCandidate, int]], PlannedStrategy] = {}

    def under(self, strategy: Sequence[tuple[ProposedCandidate, int]]) -> "PlannedStrategy":
        """The steps under one strategy."""
        key = frozenset(strategy)
        if key not in self._under:
            tiles = [tile_of(candidate, count) for candidate, count in strategy]
            self._under[key] = PlannedStrategy(PlacedStrategy(self.problem, tiles), self._priced)
        return self._under[key]

    @property
    def fastest_s(self) -> np.ndarray:
        """[S] seconds of each step under the fastest of the strategies that it was planned under; inf: none."""
        fastest_s = np.full(len(self._priced), np.inf)
        for planned in self._under.values():
            for step, time_s in planned.times_s.items():
                fastest_s[step] = min(fastest_s[step], time_s)
        return fastest_s


class PlannedStrategy:
    """Steps planned under one strategy when asked for."""

    def __init__(self, placed: PlacedStrategy, priced: Sequence[PricedBatch]) -> None:
        self._placed = placed
        self._priced = priced
        self.times_s: dict[int, float] = {}
        """Seconds of the steps that were planned."""

    @property
    def update_s(self) -> float:
        """Seconds of every step outside its micro-batches."""
        return self._placed.update_s

    def bound_s(self, step: int) -> float:
        """Seconds that a step takes at least, its update included; inf where a sequence fits nowhere."""
        return self._placed.bound_s(self._priced[step]) + self.update_s

    def time_s(self, step: int) -> float:
        """Seconds of a step, its update included; inf where a sequence fits nowhere."""
        if step not in self.times_s:
            self.times_s[step] = self._time_s(step)
        return self.times_s[step]

    def _time_s(self, step: int) -> float:
        priced = self._priced[step]
        if priced.lengths.max() > self._placed.max_length:
            return np.inf
        if len(priced.lengths) > MOST_PLANNED:
            return self.bound_s(step)
        return self._placed.planned(priced)[1] + self.update_s
