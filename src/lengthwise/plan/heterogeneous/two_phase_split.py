"""A step in two phases: the longest sequences first on pipelines of a high degree, then the others on smaller ones.

One strategy must hold the longest sequence somewhere, and that pipeline's device group is as large for the whole step.
Switching within the step frees it; with whole weights nothing moves for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.heterogeneous.adaptive_pipelines import CandidateFamily, placed_strategy
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates
from lengthwise.plan.heterogeneous.two_stage_assignment import PlacedStrategy
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

FULL_PLANS = 2
"""Splits planned in full per step and part of the search space, the most promising by estimate."""


@dataclass(frozen=True, kw_only=True)
class _Split:
    estimate_s: float
    front: PlacedStrategy
    cut: int


class SplitSearch:
    """Finds two-phase plans that beat what is there."""

    def __init__(
        self, fronts: Sequence[Sequence[PlacedStrategy]], rest: StrategyCandidates, bound: SearchSpaceBound
    ) -> None:
        """``fronts``: what the longest sequences may run on, by part of the search space."""
        self.fronts, self.rest, self.bound = [tuple(of_part) for of_part in fronts], rest, bound

    def best(self, priced: PricedBatch, limit_s: float) -> tuple[DraftPlan | None, float]:
        """The fastest two-phase plan found and its seconds, or None and ``limit_s``."""
        order = np.argsort(-priced.lengths, kind="stable")
        splits = self._estimates(priced, order, limit_s)
        best: DraftPlan | None = None
        promising: dict[_Split, None] = {}
        for fronts in self.fronts:
            of_part = sorted((s for s in splits if s.front in fronts), key=lambda split: split.estimate_s)
            promising |= dict.fromkeys(of_part[:FULL_PLANS])
        for split in sorted(promising, key=lambda split: split.estimate_s):
            if split.estimate_s >= limit_s:
                break
            phases = self._plan(priced, order, split)
            if phases is not None and (phases_s := time_s(priced, phases)) < limit_s:
                best, limit_s = phases, phases_s
        return best, limit_s

    def _estimates(self, priced: PricedBatch, order: np.ndarray, limit_s: float) -> list[_Split]:
        """Cuts that fill a front's pipelines evenly, one sequence, then whole rounds; none whose front is too slow."""
        splits = []
        rests_s: dict[int, float] = {}
        for front in dict.fromkeys(front for fronts in self.fronts for front in fronts):
            if priced.lengths[order[0]] > front.max_length:
                continue
            width = front.num_pipelines
            for cut in sorted({cut for cut in (1, width, 2 * width, 4 * width) if cut < len(order)}):
                alone_s = front.alone_s(priced, order[:cut])
                estimate_s = max(float(alone_s.max()), float(alone_s.sum()) / width) + front.update_s
                if estimate_s >= limit_s:
                    break
                if cut not in rests_s:
                    rests_s[cut] = self.bound.of(priced.lengths[order[cut:]])
                splits.append(_Split(estimate_s=estimate_s + rests_s[cut], front=front, cut=cut))
        return splits

    def _plan(self, priced: PricedBatch, order: np.ndarray, split: _Split) -> DraftPlan | None:
        long, short = np.sort(order[: split.cut]), np.sort(order[split.cut :])
        first, _ = split.front.assign(priced.part(long))
        rest = priced.part(short)
        second = self.rest.best(rest, self.rest.bounds_s(rest))
        if second is None:
            return None
        return DraftPlan(phases=(_renumber(first, long), _renumber(second.phase, short)))


def _renumber(phase: Phase, positions: np.ndarray) -> Phase:
    """Packs in positions of the whole batch."""
    return tuple(
        PipelineDraft(
            candidate=pipeline.candidate,
            ranks=pipeline.ranks,
            packs=tuple(tuple(positions[list(pack)].tolist()) for pack in pipeline.packs),
            runs=pipeline.runs,
        )
        for pipeline in phase
    )


def front_strategies(
    problem: PlanningProblem, parts: Sequence[Sequence[CandidateFamily]]
) -> list[list[PlacedStrategy]]:
    """For each part of the search space and degree that tiles the cluster in one stage, the family that computes the
    longest sequence fastest."""
    placed: dict[CandidateFamily, PlacedStrategy] = {}
    fronts = []
    for families in parts:
        fastest = _fastest_by_devices(problem, families)
        for size, family in fastest.items():
            if family not in placed:
                placed[family] = placed_strategy(problem, ((family, problem.num_devices // size),))
        fronts.append([placed[family] for _, family in sorted(fastest.items())])
    return fronts


def _fastest_by_devices(problem: PlanningProblem, families: Sequence[CandidateFamily]) -> dict[int, CandidateFamily]:
    longest = np.array([problem.max_length])
    best: dict[int, CandidateFamily] = {}
    for family in families:
        if family.num_stages > 1 or problem.num_devices % family.num_devices or family.max_tokens < problem.max_length:
            continue
        fastest = best.get(family.num_devices)
        if fastest is None or family.times_s(longest)[0] < fastest.times_s(longest)[0]:
            best[family.num_devices] = family
    return best
