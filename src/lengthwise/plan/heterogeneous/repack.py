"""Packs of few sequences, searched by what pipelines really take.

Sequences are dealt and packed for the flow-shop time. Under 1F1B a pipeline of several stages ends earlier than that,
and where sequences are few, another packing is then often faster.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from lengthwise.plan.space.draft_plan import Phase, PipelineDraft
from lengthwise.plan.space.draft_times import draft_pipeline_s, pack_times_s
from lengthwise.plan.space.problem import PricedBatch

MOST_TRIED = 300
"""Packings that are priced for a phase."""
GAIN = 1e-9
"""Relative gain that is worth a move: beyond rounding."""

Packs = tuple[tuple[int, ...], ...]


def repacked(priced: PricedBatch, phase: Phase) -> Phase:
    """The phase with its slowest pipeline packed faster, then the one that is slowest now, while that helps.

    Sequences move one at a time. Pipelines of one stage stay as they are, and those that pad or run packs as several
    candidates.
    """
    times_s, left = [_time_s(priced, pipeline) for pipeline in phase], MOST_TRIED
    improved = list(phase)
    while left > 0:
        slowest = max(range(len(phase)), key=lambda number: times_s[number])
        pipeline = improved[slowest]
        if pipeline.candidate.num_stages == 1 or pipeline.padded_to or pipeline.runs:
            break
        improved[slowest], faster_s, left = _faster(priced, pipeline, times_s[slowest], left)
        if faster_s == times_s[slowest]:
            break
        times_s[slowest] = faster_s
    return tuple(improved)


def _faster(
    priced: PricedBatch, pipeline: PipelineDraft, time_s: float, most_tried: int
) -> tuple[PipelineDraft, float, int]:
    """The pipeline after moves that make it faster, its seconds, and how many packings may still be priced."""
    limit, lengths, moved = pipeline.candidate.max_tokens, priced.batch.lengths, True
    while moved:
        moved = False
        for packs in _moves(pipeline.packs):
            if any(sum(lengths[position] for position in pack) > limit for pack in packs):
                continue
            if most_tried <= 0:
                return pipeline, time_s, 0
            most_tried -= 1
            option = replace(pipeline, packs=packs)
            if (option_s := _time_s(priced, option, limit_s=time_s)) < time_s * (1 - GAIN):
                pipeline, time_s, moved = option, option_s, True
                break
    return pipeline, time_s, most_tried


def _moves(packs: Packs) -> Iterator[Packs]:
    """The packs with one sequence in a pack of its own, first or last, or in another pack, and with one pack later."""
    for number, pack in enumerate(packs):
        for position in pack:
            rest = tuple([other for other in pack if other != position])
            left = [*packs[:number], *([rest] if rest else []), *packs[number + 1 :]]
            if rest:
                yield (*left, (position,))
                yield ((position,), *left)
            for target in range(len(left)):
                if not rest or target != number:
                    yield (*left[:target], (*left[target], position), *left[target + 1 :])
        if number:
            yield (*packs[: number - 1], pack, packs[number - 1], *packs[number + 1 :])


def _time_s(priced: PricedBatch, pipeline: PipelineDraft, *, limit_s: float = inf) -> float:
    """Seconds of the pipeline's packs, as far as they are below a limit."""
    return draft_pipeline_s(priced, pipeline, pack_times_s(priced, pipeline), limit_s=limit_s)[0]
