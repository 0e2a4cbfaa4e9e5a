"""Packs that are dealt already run where short sequences are whole on one rank of a stage, if that is faster.

The search for packs and pipelines looks at schemes whose ranks share every sequence: what others save depends on the
whole pack. So no plan is slower for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lengthwise.plan.dcp.recompute_levels import RecomputeLadder
from lengthwise.plan.space.candidate import Candidate, Family
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft, runs_of
from lengthwise.plan.space.draft_times import draft_pipeline_s, faster_with, pack_times_s
from lengthwise.plan.space.placed_sequences import with_local_sequences
from lengthwise.plan.space.problem import PricedBatch

NEARLY = 1.05
"""Draft plans up to this factor slower than the fastest are looked at."""


class LocalSequences:
    """Finds the draft plan with the same packs in which sequences are whole on one rank where that is faster."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self.candidates = with_local_sequences(candidates)
        families: dict[Family, list[Candidate]] = {}
        for candidate in self.candidates:
            families.setdefault(candidate.family, []).append(candidate)
        self._ladders = {family: RecomputeLadder(members) for family, members in families.items()}

    def faster(self, priced: PricedBatch, drafts: Sequence[tuple[DraftPlan, float]]) -> list[tuple[DraftPlan, float]]:
        """Draft plans that are faster with whole sequences on single ranks than as they are, and their seconds."""
        if not self.candidates:
            return []
        near_s = NEARLY * min(draft_s for _, draft_s in drafts)
        return faster_with(priced, [draft for draft in drafts if draft[1] <= near_s], self._pipeline)

    def _pipeline(self, priced: PricedBatch, pipeline: PipelineDraft) -> PipelineDraft:
        """The pipeline with every pack as the faster of two candidates."""
        ladder = self._ladders.get(pipeline.candidate.family)
        if ladder is None or not pipeline.packs or pipeline.padded_to:
            return pipeline
        before, tokens = runs_of(pipeline), [sum(priced.batch.lengths[i] for i in pack) for pack in pipeline.packs]
        if pipeline.candidate.num_stages > 1:
            return self._staged(priced, pipeline, ladder, max(tokens))
        fitting = [pack for pack, size in zip(pipeline.packs, tokens) if size <= ladder.max_tokens]
        placed = iter(ladder.runs(priced, fitting))
        runs = [next(placed) if size <= ladder.max_tokens else run for run, size in zip(before, tokens)]
        times_s = zip(pack_times_s(priced, pipeline), pack_times_s(priced, replace(pipeline, runs=tuple(runs))))
        chosen = [new if new_s < old_s else old for old, new, (old_s, new_s) in zip(before, runs, times_s)]
        return pipeline if chosen == list(before) else replace(pipeline, runs=tuple(chosen))

    def _staged(
        self, priced: PricedBatch, pipeline: PipelineDraft, ladder: RecomputeLadder, longest: int
    ) -> PipelineDraft:
        """A pipeline of several stages, which runs all its packs as one candidate."""
        if pipeline.runs or longest > ladder.max_tokens:
            return pipeline
        options = [pipeline, *(replace(pipeline, candidate=k) for k in ladder.candidates if k.max_tokens >= longest)]
        return min(options, key=lambda option: draft_pipeline_s(priced, option, pack_times_s(priced, option))[0])
