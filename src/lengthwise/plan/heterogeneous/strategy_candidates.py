"""Candidate strategies for a step: bounded first, then planned in the order of their bounds while one can win."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.plan.heterogeneous.two_stage_assignment import SLACK, PlacedStrategy
from lengthwise.plan.space.draft_plan import Phase
from lengthwise.plan.space.problem import PricedBatch

MANY = 1 << 30
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
    if strategy.bound_s(priced) + strategy.update_s >= limit_s * (1 - SLACK):
        return None
    phase, passes_s = strategy.planned(priced)
    time_s = passes_s + strategy.update_s
    return StrategyPlan(strategy=strategy, phase=phase, time_s=time_s) if time_s < limit_s else None


class StrategyCandidates:
    """Strategies one of which a step uses. Seconds are of whole steps, their update included."""

    def __init__(self, strategies: Sequence[PlacedStrategy]) -> None:
        self.strategies = tuple(strategies)

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

    def best(
        self, priced: PricedBatch, bounds_s: Sequence[float], *, enough_s: float = 0.0, most_planned: int = MANY
    ) -> StrategyPlan | None:
        """The fastest strategy, planned; None where none holds every sequence.

        Args:
            priced: the batch.
            bounds_s: what :meth:`bounds_s` said of it.
            enough_s: seconds at which no faster one is looked for.
            most_planned: how many strategies are planned at most.
        """
        best: StrategyPlan | None = None
        limit_s, num_planned = np.inf, 0
        for number in np.argsort(bounds_s, kind="stable").tolist():
            if bounds_s[number] >= limit_s * (1 - SLACK) or limit_s <= enough_s or num_planned >= most_planned:
                break
            strategy = self.strategies[number]
            if strategy.bound_s(priced) + strategy.update_s >= limit_s * (1 - SLACK):
                continue
            num_planned += 1
            if (planned := planned_below(strategy, priced, limit_s)) is not None:
                best, limit_s = planned, planned.time_s
        return best
