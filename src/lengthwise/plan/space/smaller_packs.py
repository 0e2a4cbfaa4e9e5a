"""Packs no larger than were measured, where that costs next to nothing by prediction.

A fit charges every micro-batch the same overhead, so that few large packs always seem faster than many small ones.
What it says of packs beyond the largest that a profile has is a guess.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heapreplace

from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft, runs_of
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch

NEXT_TO_NOTHING = 0.01
"""Relative; what a plan of measured packs may take longer by prediction."""


def in_measured_packs(
    priced: PricedBatch, draft: DraftPlan, faster: Callable[[PricedBatch, DraftPlan], DraftPlan]
) -> DraftPlan:
    """The draft plan with packs of several sequences cut in equal parts that were measured, or as it is.

    Of pipelines of one stage; sequences that are longer than any measured pack stay alone. ``faster``: chooses how the
    packs of a draft plan run.
    """
    if priced.problem.lattice is not None:
        return draft
    smaller = DraftPlan(phases=tuple([tuple([_cut(priced, pipeline) for pipeline in phase]) for phase in draft.phases]))
    is_cut = any(
        new is not old for phases in zip(smaller.phases, draft.phases) for new, old in zip(*phases, strict=True)
    )
    if not is_cut:
        return draft
    smaller = faster(priced, smaller)
    return smaller if time_s(priced, smaller) <= time_s(priced, draft) * (1 + NEXT_TO_NOTHING) else draft


def _cut(priced: PricedBatch, pipeline: PipelineDraft) -> PipelineDraft:
    """The pipeline, anew if some of its packs are cut."""
    if pipeline.candidate.num_stages > 1 or pipeline.padded_to:
        return pipeline
    packs, runs = list[tuple[int, ...]](), list[Candidate]()
    for pack, run in zip(pipeline.packs, runs_of(pipeline)):
        parts = _parts(priced, pack, run.largest_pack)
        packs += parts
        runs += [run] * len(parts)
    if len(packs) == len(pipeline.packs):
        return pipeline
    return replace(pipeline, packs=tuple(packs), runs=tuple(runs) if pipeline.runs else ())


def _parts(priced: PricedBatch, pack: tuple[int, ...], largest: int) -> list[tuple[int, ...]]:
    """The pack in as few parts of at most ``largest`` tokens as the longest first, each to the emptiest, need."""
    lengths = [priced.batch.lengths[position] for position in pack]
    if not largest or sum(lengths) <= largest or len(pack) == 1:
        return [pack]
    longest_first = sorted(range(len(pack)), key=lambda number: -lengths[number])
    for count in range(-(-sum(lengths) // largest), len(pack) + 1):
        bins: list[tuple[int, int, tuple[int, ...]]] = [(0, number, ()) for number in range(count)]
        heapify(bins)
        for number in longest_first:
            tokens, place, part = bins[0]
            heapreplace(bins, (tokens + lengths[number], place, (*part, pack[number])))
        if all(tokens <= largest or len(part) == 1 for tokens, _, part in bins):
            return [part for _, _, part in sorted(bins, key=lambda each: each[1])]
    return [(position,) for position in pack]
