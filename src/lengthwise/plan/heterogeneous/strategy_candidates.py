"""Candidate strategies for a step: bounded first, then planned in the order of their bounds while one can win."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from lengthwise.plan.heterogeneous.two_stage_assignment import SLACK, PlacedStrategy
from lengthwise.plan.space.draft_plan import Phase
from lengthwise.plan.space.problem import PricedBatch

CLEARLY = 1.03
"""Plans end at most about this factor above their bound."""


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """A strategy with its pipelines and the seconds of a step, its update included."""

    strategy: PlacedStrategy
    phase: Phase
    time_s: float


def planned_below(strategy: PlacedStrategy, priced: PricedBatch, limit_s: float) -> StrategyPlan | None:
    """The step planned under a strategy, if it takes less than ``limit_s``; not planned where a bound denies that."""
    if priced.lengths.max() > strategy.max_length:
        return None
    if limit_s < np.inf and strategy.bound_s(priced) + strategy.update_s >= limit_s * (1 - SLACK):
        return None
    phase, passes_s = strategy.planned(priced)
    time_s = passes_s + strategy.update_s
    return StrategyPlan(strategy=strategy, phase=phase, time_s=time_s) if time_s < limit_s else None


class StrategyCandidates:
    """Strategies one of which a step uses. Seconds are of whole steps, their update included."""

    def __init__(self, strategies: Sequence[PlacedStrategy]) -> None:
        self.strategies = tuple(strategies)
        self._over_floor, self._over_bound = [1.0] * len(strategies), [1.0] * len(strategies)

    def bounds_s(self, priced: PricedBatch) -> list[float]:
        """Seconds that a step takes at least under each strategy; inf where a sequence does not fit.

        Where a cheap floor is clearly above the least bound, the floor.
        """
        bounds_s = [strategy.floor_s(priced) + strategy.update_s for strategy in self.strategies]
        least_s = np.inf
        for number in np.argsort(bounds_s, kind="stable").tolist():
            if bounds_s[number] >= least_s * CLEARLY:
                break
            bounds_s[number] = self.strategies[number].bound_s(priced) + self.strategies[number].update_s
            least_s = min(least_s, bounds_s[number])
        return bounds_s

    def best(self, priced: PricedBatch, bounds_s: Sequence[float]) -> StrategyPlan | None:
        """The fastest strategy, planned; None where none holds every sequence.

        Args:
            priced: the batch.
            bounds_s: what :meth:`bounds_s` said of it.
        """
        return next(iter(self.fastest(priced, bounds_s, most=1, nearly=1.0)), None)

    def fastest(
        self, priced: PricedBatch, bounds_s: Sequence[float], *, most: int, nearly: float
    ) -> list[StrategyPlan]:
        """The fastest strategies, planned, the fastest first, ``most`` of them; none where none holds every sequence.

        Args:
            priced: the batch.
            bounds_s: what :meth:`bounds_s` said of it.
            most: how many there are at most.
            nearly: how many times the seconds of the fastest others may take.
        """
        plans: list[StrategyPlan] = []
        limit_s = np.inf
        for number in np.argsort(bounds_s, kind="stable").tolist():
            if bounds_s[number] >= limit_s * (1 - SLACK):
                break
            if (planned := planned_below(self.strategies[number], priced, limit_s)) is not None:
                plans = sorted([*plans, planned], key=lambda plan: plan.time_s)
                limit_s = plans[0].time_s * nearly
        return [plan for plan in plans if plan.time_s <= limit_s][:most]

    def learn(self, batches: Sequence[PricedBatch]) -> None:
        """Find out by how much plans of typical batches are above the floor and the bound of each strategy."""
        for number, strategy in enumerate(self.strategies):
            over: list[tuple[float, float]] = []
            for priced in batches:
                if priced.lengths.max() <= strategy.max_length:
                    planned_s = strategy.planned(priced)[1] + strategy.update_s
                    below_s = np.array([strategy.floor_s(priced), strategy.bound_s(priced)]) + strategy.update_s
                    over.append(tuple((planned_s / below_s).tolist()))
            if over:
                self._over_floor[number], self._over_bound[number] = np.mean(over, axis=0).tolist()

    def likely_best(self, priced: PricedBatch, *, most_planned: int, enough_s: float) -> StrategyPlan | None:
        """The fastest of the strategies that are likely to be: where training waits, few are bounded and planned.

        Args:
            priced: the batch.
            most_planned: how many strategies are planned at most.
            enough_s: seconds at which no faster one is looked for.
        """
        best: StrategyPlan | None = None
        for strategy in islice(self._likely_first(priced), most_planned):
            best = planned_below(strategy, priced, best.time_s if best else np.inf) or best
            if best is not None and best.time_s <= enough_s:
                break
        return best

    def _likely_first(self, priced: PricedBatch) -> Iterator[PlacedStrategy]:
        """Strategies that hold the batch, by what their plans are likely to take.

        That is told from the cheap floor first, and of those that come out first anew from the bound: a sequence much
        longer than usual raises it.
        """
        floors_s = (strategy.floor_s(priced) + strategy.update_s for strategy in self.strategies)
        likely = [
            (floor_s * over, number, False) for number, (floor_s, over) in enumerate(zip(floors_s, self._over_floor))
        ]
        heapify(likely)
        while likely and likely[0][0] < np.inf:
            _, number, is_bounded = heappop(likely)
            strategy = self.strategies[number]
            if is_bounded:
                yield strategy
            else:
                bound_s = strategy.bound_s(priced) + strategy.update_s
                heappush(likely, (bound_s * self._over_bound[number], number, True))
