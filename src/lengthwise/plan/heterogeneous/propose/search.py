"""Local search for strategies that are fast on sampled steps, by estimates."""

from collections.abc import Iterable, Sequence

import numpy as np

from lengthwise.plan.heterogeneous.propose.estimate import Estimator
from lengthwise.plan.heterogeneous.propose.moves import exchanges, merges, refills, splits
from lengthwise.plan.heterogeneous.propose.tiling import Counts, Tiler

SCREENED_STEPS = 5
"""Steps, at even distances in the order of their floors, on which every neighbour is looked at."""
SHORTLIST = 8
"""Neighbours that are then estimated on all steps."""
GAIN = 2e-4
"""Relative gain that is worth a move."""
WIDEST = 1.02
"""Screened neighbours up to this factor slower than the present strategy are still estimated on all steps."""


class Search:
    """Estimates of the strategies met so far, and moves among them."""

    def __init__(self, estimator: Estimator, tiler: Tiler, seen: Sequence[int]) -> None:
        self.tiler = tiler
        self.times_s: dict[Counts, np.ndarray] = {}
        """[S] seconds of every step, seen or not and with its update, under each strategy that was estimated on all."""
        self._estimator = estimator
        self.seen = np.array(seen)
        order = self.seen[np.argsort(estimator.floors[self.seen], kind="stable")]
        places = np.linspace(0, len(order) - 1, min(SCREENED_STEPS, len(order))).round().astype(np.int64)
        self._screened = order[places]

    @property
    def fastest_s(self) -> np.ndarray:
        """[S] seconds of every step under the strategy that is fastest for it, by estimates."""
        fastest_s: np.ndarray = np.min(list(self.times_s.values()), axis=0)
        return fastest_s

    def estimate(self, strategies: Iterable[Counts]) -> None:
        """Estimate those strategies on all steps that are new and can be placed."""
        new = [s for s in dict.fromkeys(strategies) if s not in self.times_s and self.tiler.is_placeable(s)]
        if new:
            every = np.arange(len(self._estimator.floors))
            self.times_s.update(zip(new, self._estimate_s(new, every)))

    def ranked(self, limits_s: np.ndarray | float = np.inf, *, holding: int = 0) -> list[Counts]:
        """Strategies by how far they lower ``limits_s`` [S], the seconds of each step so far, on the steps seen.

        Only those that hold a sequence of ``holding`` tokens.
        """
        feasible = [counts for counts in self.times_s if self.tiler.max_length(counts) >= holding]
        return sorted(feasible, key=lambda counts: (self.mean_s(counts, limits_s), counts))

    def mean_s(self, counts: Counts, limits_s: np.ndarray | float = np.inf) -> float:
        """Estimated seconds of the average step seen, where none takes longer than ``limits_s``."""
        return float(np.minimum(self.times_s[counts], limits_s)[self.seen].mean())

    def climb(self, start: Counts, limits_s: np.ndarray | float = np.inf, *, holding: int = 0) -> Counts:
        """The best strategy reached from ``start`` by moves that lower ``mean_s``.

        Exchanges start with half of the devices; where no exchange helps, half as many are tried, and in the end all
        candidates of moves.
        """
        present, unit = start, max(1, self.tiler.workload.num_devices // 2)
        limits_s = np.broadcast_to(limits_s, len(self._estimator.floors))
        while True:
            moves = [exchanges] if unit > 1 else [exchanges, refills, splits, merges]
            neighbours = dict.fromkeys(new for move in moves for new in move(self.tiler, present, unit))
            neighbours.pop(present, None)
            fitting = [new for new in neighbours if self.tiler.max_length(new) >= holding]
            best = self._best_of(fitting, present, limits_s)
            if best is not None:
                present = best
            elif unit > 1:
                unit //= 2
            else:
                return present

    def _estimate_s(self, strategies: list[Counts], steps: np.ndarray) -> np.ndarray:
        """[M, len(steps)] seconds of some steps, the update of the candidate whose update takes longest included."""
        counts = np.array(strategies)
        updates_s = np.where(counts > 0, self.tiler.workload.update_s, 0.0).max(axis=1)
        estimates_s: np.ndarray = self._estimator.times_s(counts, steps) + updates_s[:, None]
        return estimates_s

    def _best_of(self, neighbours: list[Counts], present: Counts, limits_s: np.ndarray) -> Counts | None:
        """The best neighbour if it is better than ``present``; few are estimated on all steps."""
        new = [counts for counts in neighbours if counts not in self.times_s]
        if new:
            screened = self._screened
            screened_s = np.minimum(self._estimate_s(new, screened), limits_s[screened]).mean(axis=1)
            widest_s = WIDEST * np.minimum(self.times_s[present], limits_s)[screened].mean()
            order = np.argsort(screened_s, kind="stable")[:SHORTLIST].tolist()
            self.estimate(new[row] for row in order if screened_s[row] <= widest_s)
        estimated = [counts for counts in neighbours if counts in self.times_s]
        best = min(estimated, key=lambda counts: (self.mean_s(counts, limits_s), counts), default=present)
        return best if self.mean_s(best, limits_s) < self.mean_s(present, limits_s) * (1 - GAIN) else None
