"""Pipelines that run each pack as fast as its tokens allow: recompute and methods change from pack to pack."""

from collections.abc import Sequence

import numpy as np

from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem

MOST_COMPARED = 1 << 18
"""Sequences on which the candidates of a family are compared; of more, some at even distances by length."""


class AdaptiveCandidate(Candidate):
    """The candidates of one family as one: proposals see the fastest that holds each sequence.

    It is a little too fast: as if a pack of short sequences held what the leanest candidate holds. Plans are made with
    :meth:`tile`, which is exact.
    """

    def __init__(self, pivot: Candidate, leaner: Sequence[Candidate]) -> None:
        super().__init__(
            scheme=pivot.scheme,
            cost=pivot.cost,
            num_cluster_devices=pivot.num_cluster_devices,
            token_limit=pivot.token_limit,
            sizes=pivot.sizes,
        )
        self.__dict__.update(pivot=pivot, leaner=tuple(leaner), max_tokens=(pivot, *leaner)[-1].max_tokens)

    pivot: Candidate
    leaner: tuple[Candidate, ...]

    def times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds per stage of each sequence under the fastest candidate that holds it alone."""
        lengths = np.asarray(lengths)
        times_s = self.pivot.times_s(lengths)
        below = self.pivot.max_tokens
        for candidate in self.leaner:
            longer = lengths > below
            if not longer.any():
                break
            times_s = np.where(longer, candidate.times_s(lengths) + candidate.overhead_s - self.overhead_s, times_s)
            below = candidate.max_tokens
        return times_s

    def tile(self, count: int) -> PipelineGroup:
        """``count`` pipelines of these candidates."""
        return PipelineGroup(candidate=self.pivot, count=count, leaner=self.leaner)


def flexible_candidates(problem: PlanningProblem) -> list[AdaptiveCandidate]:
    """One candidate per family; two, the fastest and the leanest, where there are several stages.

    Packs of one pipeline that recompute different shares of their layers have different shares of forward in their
    time. In 1F1B they may then take longer than the flow shop says, so pipelines of several stages keep to one.
    """
    lengths = np.concatenate(problem.samples) if problem.samples else np.array([problem.max_length])
    if len(lengths) > MOST_COMPARED:
        lengths = np.sort(lengths)[:: -len(lengths) // MOST_COMPARED]  # from the longest
    flexible = []
    for family in problem.families.values():
        ladder = fastest_first(family)
        pivot = min(range(len(ladder)), key=lambda level: _corpus_time_s(ladder, level, lengths))
        if ladder[0].num_stages == 1:
            flexible.append(AdaptiveCandidate(ladder[pivot], ladder[pivot + 1 :]))
        else:
            flexible += [AdaptiveCandidate(candidate, ()) for candidate in dict.fromkeys((ladder[pivot], ladder[-1]))]
    return flexible


def fastest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Kinds each of which holds more tokens than all faster ones; the others are never of use.

    "Faster" must hold for every length, so that a sequence never takes less time than a shorter one.
    """
    grid = np.unique(np.geomspace(1, max(candidate.max_tokens for candidate in candidates), 32).astype(np.int64))
    alone = {candidate: candidate.times_s(grid) + candidate.overhead_s for candidate in candidates}
    ladder: list[Candidate] = []
    for candidate in sorted(
        candidates, key=lambda candidate: -candidate.max_tokens
    ):  # a slower one with less room is of no use
        if not ladder or (
            (alone[candidate] <= alone[ladder[-1]]).all() and candidate.max_tokens < ladder[-1].max_tokens
        ):
            ladder.append(candidate)
        elif candidate.max_tokens == ladder[-1].max_tokens and (alone[candidate] <= alone[ladder[-1]]).all():
            ladder[-1] = candidate
    return ladder[::-1]


def _corpus_time_s(ladder: Sequence[Candidate], level: int, lengths: np.ndarray) -> float:
    """Seconds of all sequences with ``ladder[level]`` as pivot; what it cannot hold runs as the leaner ones."""
    pivot = AdaptiveCandidate(ladder[level], ladder[level + 1 :])
    packed = lengths <= pivot.pivot.max_tokens
    shares_s = pivot.overhead_s * lengths[packed].sum() / pivot.pivot.max_tokens
    return float(pivot.times_s(lengths).sum()) + float(shares_s) + pivot.overhead_s * float((~packed).sum())
