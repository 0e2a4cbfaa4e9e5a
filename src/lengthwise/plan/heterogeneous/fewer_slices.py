"""Packs of a pipeline whose micro-batches are cut into slices: those of short sequences in fewer, and smaller packs.

Sequences are dealt as if each pack had all slices of its scheme, which makes packs few and large. But the longest
sequence alone needs them: what is short costs less overhead in few slices, and packs that are small leave memory for
the next one to begin before they end.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.draft_plan import PipelineDraft
from lengthwise.plan.space.draft_times import draft_pipeline_s, pack_times_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.sliced_packs import counted_otherwise, smaller_packs, with_fewer_slices

SLICES_OF_PACKS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Slices, as large as those of the longest sequence, that packs of short ones may have in place of many."""
USUAL_SLICES = 1.0
"""Of these, what is tried of a strategy of which it is not known yet whether it is nearly the fastest."""


def has_slices(pipeline: PipelineDraft) -> bool:
    """Whether packs of the pipeline are cut into slices, and may be changed."""
    return pipeline.candidate.scheme.slices > 1 and bool(pipeline.packs) and not pipeline.padded_to


def in_usual_slices(priced: PricedBatch, pipeline: PipelineDraft) -> PipelineDraft:
    """The pipeline with its packs in the faster of the two usual ways; as it is where it has no slices."""
    if not has_slices(pipeline) or priced.problem.objective is not Objective.FLOW_SHOP or priced.problem.lattice:
        return pipeline
    options = [pipeline, cut(priced, pipeline), cut(priced, pipeline, USUAL_SLICES)]
    return _fastest(priced, [option for option in options if option is not None])


def in_fewer_slices(priced: PricedBatch, pipeline: PipelineDraft) -> PipelineDraft:
    """The pipeline, or one with other slices of the longest sequence and its short ones in smaller packs of fewer
    slices, if that is faster.
    """
    longest = max(sum(priced.batch.lengths[i] for i in pack) for pack in pipeline.packs)
    options = [
        cut(priced, replace(pipeline, candidate=candidate), num_slices)
        for candidate in (pipeline.candidate, *counted_otherwise([pipeline.candidate]))
        if candidate.max_tokens >= longest
        for num_slices in (None, *SLICES_OF_PACKS)
    ]
    return _fastest(priced, [pipeline, *(option for option in options if option is not None)])


def cut(priced: PricedBatch, pipeline: PipelineDraft, num_slices: float | None = None) -> PipelineDraft | None:
    """The pipeline with slices that are as large as those of its longest pack.

    Returns:
        The same packs, or with ``num_slices`` its short sequences in packs of so many slices; None where such a pack
        has more tokens than fit.
    """
    candidate = pipeline.candidate
    times_s, tokens = priced.times_s(candidate), np.array(priced.batch.lengths)
    packs = pipeline.packs if num_slices is None else smaller_packs(candidate, pipeline.packs, times_s, num_slices)
    works_s, num_tokens = (np.array([values[list(pack)].sum() for pack in packs]) for values in (times_s, tokens))
    if num_tokens.max() > candidate.max_tokens:
        return None
    return replace(pipeline, packs=packs, runs=with_fewer_slices(candidate, works_s, num_tokens))


def _fastest(priced: PricedBatch, options: Sequence[PipelineDraft]) -> PipelineDraft:
    """The first of the fastest options."""
    best, best_s = options[0], float("inf")
    for option in options:
        times_s = pack_times_s(priced, option)
        bound_s = sum(times_s) + (option.candidate.least_stages - 1) * max(times_s)
        time_s = draft_pipeline_s(priced, option, times_s, limit_s=best_s)[0] if bound_s < best_s else bound_s
        if time_s < best_s:
            best, best_s = option, time_s
    return best
