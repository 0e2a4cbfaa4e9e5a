"""Packs that are dealt already run as the fastest candidate of their pipeline's family that holds them.

Where they are cut into slices, those of short sequences may become smaller packs of fewer slices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from math import inf

import numpy as np

from lengthwise.plan.dcp.recompute_levels import RecomputeLadder
from lengthwise.plan.heterogeneous.adaptive_pipelines import undominated
from lengthwise.plan.heterogeneous.fewer_slices import cut, has_slices, in_fewer_slices
from lengthwise.plan.space.candidate import Candidate, Family
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft
from lengthwise.plan.space.draft_times import draft_pipeline_s, pack_times_s, time_s
from lengthwise.plan.space.finer_recompute import between, next_fewer
from lengthwise.plan.space.problem import PricedBatch

SLACK = 1e-9
"""Relative, for the rounding of sums."""


class FastestRuns:
    """Chooses methods, recompute and slices of packs, family by family."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        candidates = tuple(candidates)
        self._next_fewer = next_fewer(candidates)
        self._families: dict[Family, list[Candidate]] = {}
        for candidate in candidates:
            self._families.setdefault(candidate.family, []).append(candidate)
        self._ladders: dict[Family, RecomputeLadder] = {}
        self._alone: dict[Family, Sequence[Candidate]] = {}

    def improve(self, priced: PricedBatch, draft: DraftPlan, draft_s: float) -> tuple[DraftPlan, float]:
        """The draft plan, or one of the same packs that takes less time, and its seconds."""
        improved = self.of(priced, draft)
        improved_s = time_s(priced, improved)
        return (improved, improved_s) if improved_s < draft_s else (draft, draft_s)

    def of(self, priced: PricedBatch, draft: DraftPlan) -> DraftPlan:
        """Return the same packs on the same pipelines, each run as fast as its family allows."""
        return DraftPlan(phases=tuple(self._phase(priced, phase) for phase in draft.phases))

    def _phase(self, priced: PricedBatch, phase: Phase) -> Phase:
        """The pipelines with their packs; packs on one stage are looked at together, family by family."""
        improved, of_family = list(phase), dict[Family, list[int]]()
        for number, pipeline in enumerate(phase):
            if not pipeline.packs or pipeline.padded_to:
                continue
            if pipeline.candidate.num_stages > 1:
                improved[number] = self._staged(priced, pipeline)
            else:
                of_family.setdefault(pipeline.candidate.family, []).append(number)
        for family, numbers in of_family.items():
            if family not in self._ladders:
                self._ladders[family] = RecomputeLadder(self._families[family])
            packs = [pack for number in numbers for pack in phase[number].packs]
            runs = iter(self._ladders[family].runs(priced, packs))
            for number in numbers:
                improved[number] = replace(phase[number], runs=tuple(islice(runs, len(phase[number].packs))))
        return tuple(improved)

    def _staged(self, priced: PricedBatch, pipeline: PipelineDraft) -> PipelineDraft:
        """A pipeline of several stages, which runs all its packs as one candidate, or as one in fewer slices."""
        family = pipeline.candidate.family
        if pipeline.runs and (pipeline.is_in_order or not has_slices(pipeline)):  # as they were chosen here, maybe
            return pipeline
        if family not in self._alone:
            self._alone[family] = undominated(self._families.get(family, (pipeline.candidate,)))
        longest = max(sum(priced.batch.lengths[i] for i in pack) for pack in pipeline.packs)
        fitting = [candidate for candidate in self._alone[family] if candidate.max_tokens >= longest]
        if not fitting:
            return pipeline
        best, best_s = pipeline, _time_s(priced, pipeline)
        for candidate in _that_may_beat(priced, pipeline, fitting, best_s):
            option = _as_candidate(priced, pipeline, candidate)
            if (time_s := _time_s(priced, option, limit_s=best_s)) < best_s:
                best, best_s = option, time_s
        fewer = self._next_fewer.get(best.candidate)
        finer = () if fewer is None else between(fewer, best.candidate)
        fewest = next((candidate for candidate in finer if candidate.max_tokens >= longest), None)
        option = best if fewest is None else _as_candidate(priced, best, fewest)
        if (time_s := _time_s(priced, option, limit_s=best_s)) < best_s:
            best, best_s = option, time_s
        return in_fewer_slices(priced, best) if has_slices(best) else best


def _as_candidate(priced: PricedBatch, pipeline: PipelineDraft, candidate: Candidate) -> PipelineDraft:
    """The packs of a pipeline as another candidate of its family that holds them, in as few slices as they need."""
    option = replace(pipeline, candidate=candidate)
    return (cut(priced, option) if pipeline.runs else None) or option


def _that_may_beat(
    priced: PricedBatch, pipeline: PipelineDraft, candidates: Sequence[Candidate], limit_s: float
) -> list[Candidate]:
    """The candidates under which no bound says that the pipeline takes ``limit_s`` or more, of all bounds at once."""
    starts = [0, *accumulate(map(len, pipeline.packs))][:-1]
    positions = list(chain.from_iterable(pipeline.packs))
    sums_s = np.add.reduceat(np.stack([priced.times_s(k)[positions] for k in candidates]), starts, axis=1)
    times_s = sums_s + np.array([[priced.overhead_s(k) / k.scheme.slices] for k in candidates])
    later = np.array([candidate.least_stages - 1 for candidate in candidates])
    bounds_s = times_s.sum(axis=1) + later * times_s.max(axis=1)
    return [candidate for candidate, bound_s in zip(candidates, bounds_s.tolist()) if bound_s * (1 - SLACK) < limit_s]


def _time_s(priced: PricedBatch, pipeline: PipelineDraft, *, limit_s: float = inf) -> float:
    """Seconds of the pipeline's packs; where a bound of them is ``limit_s`` or more, that bound."""
    times_s = pack_times_s(priced, pipeline)
    bound_s = sum(times_s) + (pipeline.candidate.least_stages - 1) * max(times_s)
    return bound_s if bound_s >= limit_s else draft_pipeline_s(priced, pipeline, times_s, limit_s=limit_s)[0]
