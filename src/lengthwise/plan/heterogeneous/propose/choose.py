"""Choose strategies by planning promising ones on steps that the search has not seen, beside their rivals."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from lengthwise.plan.heterogeneous.propose.planned import PlannedSteps
from lengthwise.plan.heterogeneous.propose.search import Search
from lengthwise.plan.heterogeneous.propose.tiling import Counts, strategy_of

OPTIMISM = 0.94
"""Plans are hardly faster than this factor of their estimate; a strategy that would still not help is not planned."""
WORTH = 2e-3
"""Relative gain in the average step for which one more candidate is taken."""


class StrategyComparison:
    """Strategies planned on some steps."""

    def __init__(self, search: Search, planned: PlannedSteps, steps: Sequence[int]) -> None:
        """``planned``: the samples of numbers ``steps``."""
        self.times_s: dict[Counts, np.ndarray] = {}
        """[S] planned seconds of each step under each strategy that was planned; inf where it does not fit."""
        self._search = search
        self._steps = np.array(steps)
        self._planned = planned
        self._candidates = search.tiler.workload.candidates

    @property
    def fastest_s(self) -> np.ndarray:
        """[S] seconds of each step under the best strategy planned so far."""
        fastest_s: np.ndarray = np.min(list(self.times_s.values()), axis=0, initial=np.inf)
        return np.broadcast_to(fastest_s, len(self._steps))

    def best(self, among: Iterable[Counts]) -> Counts | None:
        """The fastest of those planned, on the average step; None if none holds all steps."""
        planned = [counts for counts in among if counts in self.times_s and np.isfinite(self.times_s[counts]).all()]
        return min(planned, key=lambda counts: (self.times_s[counts].mean(), counts), default=None)

    def fastest_of(self, rivals: Sequence[Counts]) -> Counts | None:
        """The fastest of some strategies on the average step, planned as far as that takes; None if there is none."""
        estimated = [counts for counts in rivals if counts in self._search.times_s]
        best: Counts | None = None
        for counts in sorted(estimated, key=lambda counts: (self._estimate_s(counts).mean(), counts)):
            limit_s = None if best is None else float(self.times_s[best].mean())
            self._plan(counts, partial(_is_faster, limit_s=limit_s), is_proof_needed=True)
            best = self.best(rivals)
        return best

    def beat(self, rivals: Iterable[Counts]) -> None:
        """Plan those strategies that are not proven to be slower than the fastest one planned so far."""
        for counts in rivals:
            best = self.best(self.times_s)
            limit_s = None if best is None else float(self.times_s[best].mean())
            if counts in self._search.times_s:
                self._plan(counts, partial(_is_faster, limit_s=limit_s), is_proof_needed=True)

    def enter(self, rivals: Iterable[Counts], *, steps: int) -> None:
        """Plan strategies while they could be the fastest or help some steps, at most about ``steps`` steps in all."""
        for counts in rivals:
            if steps >= len(self._steps):
                best, fastest_s = self.best(self.times_s), self.fastest_s
                limit_s = np.inf if best is None else float(self.times_s[best].mean())
                steps -= self._plan(counts, partial(_helps, limit_s=limit_s, fastest_s=fastest_s))

    def choose(self, always: Sequence[Counts], *, max_strategies: int) -> list[tuple[Counts, float]]:
        """The candidates and their seconds of the average step: ``always``, the fastest, and what complements them.

        A step that a candidate does not hold takes what it takes under the fastest one.
        """
        best = self.best(self.times_s)
        chosen = list(dict.fromkeys([*always, best] if best is not None else always))
        while len(chosen) < max_strategies:
            fastest_s = np.min([self.times_s[counts] for counts in chosen], axis=0)
            gains = {
                counts: float((fastest_s - np.minimum(fastest_s, times_s)).mean())
                for counts, times_s in self.times_s.items()
                if counts not in chosen
            }
            other = max(gains, key=lambda counts: gains[counts], default=None)
            if other is None or gains[other] < WORTH * fastest_s.mean():
                break
            chosen.append(other)
        fastest_s = np.min([self.times_s[counts] for counts in chosen], axis=0)
        means_s = [
            float(np.where(np.isfinite(times_s), times_s, fastest_s).mean())
            for times_s in (self.times_s[counts] for counts in chosen)
        ]
        return sorted(zip(chosen, means_s), key=lambda entry: (entry[1], entry[0]))

    def _estimate_s(self, counts: Counts) -> np.ndarray:
        estimates_s: np.ndarray = self._search.times_s[counts][self._steps]
        return estimates_s

    def _plan(
        self, counts: Counts, is_worthwhile: Callable[[np.ndarray], bool], *, is_proof_needed: bool = False
    ) -> int:
        """Plan step after step while it is worthwhile, the steps to come hoped to be fast; how many were planned.

        Where a proof is needed, what estimates do not let hope for is given up only if bounds do not either, cheap ones
        first.
        """
        if counts in self.times_s:
            return 0
        if is_proof_needed:
            workload = self._search.tiler.workload
            if not is_worthwhile(workload.floors_s(np.array(counts) > 0)[self._steps]):
                return 0
        planned = self._planned.under(strategy_of(self._candidates, counts))
        times_s = self._estimate_s(counts) * OPTIMISM
        for step in range(len(times_s)):
            if not is_worthwhile(times_s) and is_proof_needed:
                times_s[step:] = [planned.bound_s(later) for later in range(step, len(times_s))]
                is_proof_needed = False
            if not is_worthwhile(times_s):
                return step
            times_s[step] = planned.time_s(step)
        self.times_s[counts] = times_s
        return len(times_s)


def _is_faster(times_s: np.ndarray, *, limit_s: float | None) -> bool:
    """Whether a strategy is faster on the average step than ``limit_s``, if there is a limit."""
    return limit_s is None or float(times_s.mean()) < limit_s


def _helps(times_s: np.ndarray, *, limit_s: float, fastest_s: np.ndarray) -> bool:
    """Whether a strategy is the fastest on the average step, or makes enough of some steps faster."""
    helped_s = float(np.minimum(times_s, fastest_s).mean())
    return float(times_s.mean()) < limit_s or helped_s < float(fastest_s.mean()) * (1 - WORTH)
