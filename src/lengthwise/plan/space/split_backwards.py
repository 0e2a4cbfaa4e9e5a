"""Further schemes whose stages split backwards and fill their waits with gradients of weights (zero bubble).

They take no longer than the same schemes with whole backwards for the same packs, and hold as many tokens, unless the
last stage, which has the head, is the fullest then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import SPLIT_BACKWARD_METHODS, PipelineConfig
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import faster_with
from lengthwise.plan.space.problem import PricedBatch


class ZeroBubble(StrEnum):
    """Which pipelines of several stages split backwards, of those that can."""

    NONE = "none"
    AUTO = "auto"
    ALL = "all"


def can_split(scheme: PipelineConfig) -> bool:
    """Whether stages can split backwards of some layers, and one of them sends its gradient on sooner for it."""
    return (
        scheme.num_stages > 1
        and scheme.is_plain
        and scheme.head_groups == 1
        and not scheme.shard_gradients
        and not all(scheme.recompute)
        and SPLIT_BACKWARD_METHODS.issuperset(scheme.methods)
    )


def with_split_backwards(candidates: Sequence[Candidate], mode: ZeroBubble) -> tuple[Candidate, ...]:
    """The candidates of a search space in which stages may split backwards, or have to where they can and costs know
    what that takes.
    """
    if mode is ZeroBubble.NONE or not all(_is_priced(candidate.cost) for candidate in candidates):
        return tuple(candidates)
    split = {candidate: _split(candidate) for candidate in candidates if can_split(candidate.scheme)}
    if mode is ZeroBubble.ALL:
        every = (split.get(candidate, candidate) for candidate in candidates)
        return tuple(candidate for candidate in every if candidate.max_tokens >= 1)
    return (*candidates, *(candidate for candidate in split.values() if candidate.max_tokens >= 1))


def _is_priced(cost: CostModel) -> bool:
    """Whether a cost model knows what split backwards leave for later."""
    return bool(getattr(cost, "prices_split_backwards", hasattr(cost, "weight_times_s")))


def with_whole_backwards(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates without those that split backwards, where the same scheme with whole ones is among them."""
    unsplit = {candidate.scheme for candidate in candidates if not candidate.scheme.zero_bubble}
    return tuple(
        candidate
        for candidate in candidates
        if not candidate.scheme.zero_bubble or replace(candidate.scheme, zero_bubble=False) not in unsplit
    )


def _split(candidate: Candidate) -> Candidate:
    return replace(candidate, scheme=replace(candidate.scheme, zero_bubble=True))


class SplitBackwards:
    """Finds the draft plan with the same packs in which stages split backwards, where the search space has that."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        candidates = tuple(candidates)
        by_scheme = {candidate.scheme: candidate for candidate in candidates if not candidate.scheme.zero_bubble}
        self._split: Mapping[Candidate, Candidate] = {
            by_scheme[scheme]: candidate
            for candidate in candidates
            if candidate.scheme.zero_bubble and (scheme := replace(candidate.scheme, zero_bubble=False)) in by_scheme
        }

    def faster(self, priced: PricedBatch, drafts: Sequence[tuple[DraftPlan, float]]) -> list[tuple[DraftPlan, float]]:
        """Draft plans that are faster with split backwards than as they are, split, and their seconds."""
        return faster_with(priced, drafts, self._pipeline)

    def _pipeline(self, priced: PricedBatch, pipeline: PipelineDraft) -> PipelineDraft:
        """The pipeline with split backwards, if it has several stages, all its packs can and still fit."""
        runs = [self._split.get(run) for run in (pipeline.candidate, *pipeline.runs)]
        if not pipeline.packs or pipeline.padded_to or None in runs:
            return pipeline
        longest = max(sum(priced.batch.lengths[i] for i in pack) for pack in pipeline.packs)
        if priced.problem.lattice is not None or longest > min(run.max_tokens for run in runs if run is not None):
            return pipeline
        candidate, *others = (run for run in runs if run is not None)
        return replace(pipeline, candidate=candidate, runs=tuple(others))
