"""The price of draft plans: seconds of packs, of pipelines and of steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from lengthwise.core.one_f_one_b import MIXED_RECOMPUTE, PassTimes, UpdateParts, pipeline_end_s, update_cover_s
from lengthwise.core.zero_bubble import filled_end_s
from lengthwise.cost.overlapped import OverlappedCost, hides_updates
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import (
    DraftPlan,
    Phase,
    PipelineDraft,
    computed_lengths_of,
    fillers,
    laid_out,
    lengths_of,
    numbers_by_candidate,
    runs_of,
    strategy_of,
)
from lengthwise.plan.space.placed_sequences import PlacedPack, place_sequences
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.sliced_packs import sliced_pipeline_end


def pack_times_s(priced: PricedBatch, pipeline: PipelineDraft) -> list[float]:
    """Seconds per stage of each pack of the pipeline, overhead included."""
    return phase_times_s(priced, (pipeline,))[0]


def phase_times_s(priced: PricedBatch, phase: Phase) -> list[list[float]]:
    """Seconds per stage of each pack of each pipeline, overhead included."""
    times_s = _times_without_filler_s(priced, phase)
    times_s = [
        [time_s + more_s for time_s, more_s in zip(packs_s, _placed_times_s(priced, pipeline, packs_s))]
        if any(run.longest_local for run in set(runs_of(pipeline)))
        else packs_s
        for pipeline, packs_s in zip(phase, times_s)
    ]
    if priced.problem.lattice is not None:
        times_s = [
            [time_s + more_s for time_s, more_s in zip(packs_s, _filler_times_s(priced, pipeline))]
            for pipeline, packs_s in zip(phase, times_s)
        ]
    return [
        [time_s + late_s for time_s, late_s in zip(packs_s, _late_reductions_s(priced, pipeline, packs_s))]
        if pipeline.candidate.reduction is not None
        else packs_s
        for pipeline, packs_s in zip(phase, times_s)
    ]


def _placed_times_s(priced: PricedBatch, pipeline: PipelineDraft, times_s: Sequence[float]) -> list[float]:
    """Seconds that each pack takes longer than ``times_s``, what it took if all sequences that may be whole on one rank
    were, and every rank had as many tokens.
    """
    return [
        0.0 if not run.longest_local else _placed(priced, pipeline, number, time_s)[1]
        for number, (run, time_s) in enumerate(zip(runs_of(pipeline), times_s))
    ]


def placements(priced: PricedBatch, pipeline: PipelineDraft) -> list[PlacedPack | None]:
    """Where the sequences of each pack are, in its order; None: all ranks share all of them."""
    runs = runs_of(pipeline)
    if pipeline.padded_to or not any(run.longest_local for run in runs):
        return [None] * len(runs)
    times_s = _times_without_filler_s(priced, (pipeline,))[0]
    return [
        _placed(priced, pipeline, number, time_s)[0] if run.longest_local else None
        for number, (run, time_s) in enumerate(zip(runs, times_s))
    ]


def _placed(
    priced: PricedBatch, pipeline: PipelineDraft, number: int, time_s: float
) -> tuple[PlacedPack | None, float]:
    """The faster of a placement of one pack and equal parts of all sequences, and by how much it is above ``time_s``.

    A placement adds what ranks send of sequences that are not whole on one, and the tokens that the fullest rank has
    beyond the mean.
    """
    run, lengths = runs_of(pipeline)[number], lengths_of(priced, pipeline, number)
    placed = place_sequences(
        tuple(lengths), degree=run.scheme.degree, longest=run.longest_local, most_tokens=run.max_tokens
    )
    short = np.array(lengths)
    sent_s = run.shared_times_s(short) - run.times_s(short)
    equal_s = float(sent_s.sum())
    if not placed.placement:
        return None, equal_s
    more_s = float(sent_s[[len(pieces) != 1 for pieces in placed.placement]].sum())
    more_s += max(0.0, time_s + more_s - run.overhead_s) * (placed.of_mean_tokens - 1)
    return (placed, more_s) if more_s < equal_s else (None, equal_s)


def _late_reductions_s(priced: PricedBatch, pipeline: PipelineDraft, times_s: Sequence[float]) -> list[float]:
    """Seconds that each pack waits for its gradients to be reduced, as its backward is too short to hide them.

    ``times_s``: of each pack if it were not. Backwards leave the links free where they compute.
    """
    runs, reduction = runs_of(pipeline), pipeline.candidate.reduction
    assert reduction is not None, "gradients are sharded"
    lengths = [lengths_of(priced, pipeline, number) for number in range(len(pipeline.packs))]
    covers_s = [
        (time_s - run.overhead_s - comm_s) * (1 - 1 / run.forwards)
        for time_s, run, comm_s in zip(times_s, runs, comm_times_s(runs, lengths))
    ]
    return [reduction.late_s(cover_s) for cover_s in covers_s]


def _times_without_filler_s(priced: PricedBatch, phase: Phase) -> list[list[float]]:
    """The packs of all pipelines that run as one candidate are priced together."""
    packs = [pack for pipeline in phase if not pipeline.padded_to for pack in pipeline.packs]
    runs = [run for pipeline in phase if not pipeline.padded_to for run in runs_of(pipeline)]
    sums_s = np.zeros(len(packs))
    for candidate, mine in numbers_by_candidate(runs).items():
        packs_of_candidate = [packs[number] for number in mine]
        starts = [0, *accumulate(map(len, packs_of_candidate))][:-1]
        positions = list(chain.from_iterable(packs_of_candidate))
        computed_s = np.add.reduceat(priced.times_s(candidate)[positions], starts) + priced.overhead_s(candidate)
        sums_s[mine] = np.maximum(computed_s, candidate.launch_s)
    each_s = iter(sums_s.tolist())
    return [
        _padded_times_s(priced, pipeline) if pipeline.padded_to else list(islice(each_s, len(pipeline.packs)))
        for pipeline in phase
    ]


def _padded_times_s(priced: PricedBatch, pipeline: PipelineDraft) -> list[float]:
    each_s = pipeline.candidate.times_s(np.array(pipeline.padded_to)).tolist()
    overhead_s, per_sequence = pipeline.candidate.overhead_s, priced.problem.overhead_per_sequence
    counts, launch_s = [max(pipeline.rows, len(pack)) for pack in pipeline.packs], pipeline.candidate.launch_s
    return [
        max(launch_s, time_s * count + overhead_s * (count if per_sequence else 1))
        for time_s, count in zip(each_s, counts)
    ]


def _filler_times_s(priced: PricedBatch, pipeline: PipelineDraft) -> list[float]:
    """Seconds per stage that filling up adds to each pack of the pipeline."""
    longest = np.array([longest for _, longest in laid_out(priced, pipeline)], dtype=np.int64)
    wholes, rests = np.divmod(np.array(fillers(priced, pipeline), dtype=np.int64), longest)
    added_s = np.zeros(len(pipeline.packs))
    for candidate, mine in numbers_by_candidate(runs_of(pipeline)).items():
        rests_s = np.where(rests[mine] > 0, candidate.times_s(np.maximum(rests[mine], 1)), 0.0)
        added_s[mine] = wholes[mine] * candidate.times_s(longest[mine]) + rests_s
    each_s: list[float] = added_s.tolist()
    return each_s


def pipeline_time_s(
    times_s: Sequence[float],
    num_stages: int,
    objective: Objective,
    *,
    forwards: Sequence[float],
    weights_s: Sequence[float] = (),
) -> float:
    """Seconds of a pipeline under 1F1B or with split backwards, or as Hydraulis' Eq. (1) counts them.

    Args:
        times_s: seconds per stage of its packs, the longest first.
        num_stages: of the pipeline.
        objective: which of the two.
        forwards: how many forwards each pack takes as long as.
        weights_s: seconds of each pack in gradients of weights that may wait; empty: backwards are whole.
    """
    if not times_s:
        return 0.0
    if objective is Objective.MAX_TIMES_COUNT:
        return max(times_s) * (num_stages - 1 + len(times_s))
    if not any(weights_s):
        return pipeline_end_s(times_s, forwards, num_stages)
    forwards_s = [time_s / count for time_s, count in zip(times_s, forwards)]
    backwards_s = [time_s - forward_s for time_s, forward_s in zip(times_s, forwards_s)]
    return filled_end_s(PassTimes(forwards_s, backwards_s, weights_s), num_stages)


def draft_pipeline_s(
    priced: PricedBatch, pipeline: PipelineDraft, times_s: list[float], *, limit_s: float = inf
) -> tuple[float, float]:
    """Seconds of a pipeline whose packs take ``times_s`` per stage, and of its passes that may hide an update.

    Of slices, whose order takes long to find, inf may stand for ``limit_s`` seconds or more.
    """
    order, runs = issue_order(priced, pipeline, times_s), runs_of(pipeline)
    if times_s and pipeline.candidate.scheme.slices > 1 and priced.problem.objective is Objective.FLOW_SHOP:
        ordered_s = [times_s[k] for k in order]
        lengths = [computed_lengths_of(priced, pipeline, k) for k in order]
        ordered = [runs[k] for k in order]
        parts_s = [time_s / run.scheme.slices for time_s, run in zip(ordered_s, ordered)]
        cover_s = update_cover_s(parts_s, [runs[k].forwards for k in order])
        return sliced_pipeline_end(ordered, lengths, ordered_s, limit_s=limit_s).end_s, cover_s
    ordered_s, forwards = [times_s[k] for k in order], [runs[k].forwards for k in order]
    of_packs_s = weight_times_s(priced, pipeline, times_s) if _is_split(pipeline) else []
    weights_s = [of_packs_s[k] for k in order] if of_packs_s else []
    num_stages, objective = pipeline.candidate.num_stages, priced.problem.objective
    time_s = pipeline_time_s(ordered_s, num_stages, objective, forwards=forwards, weights_s=weights_s)
    return time_s, update_cover_s(ordered_s, forwards)


def _is_split(pipeline: PipelineDraft) -> bool:
    return pipeline.candidate.scheme.zero_bubble


def weight_times_s(priced: PricedBatch, pipeline: PipelineDraft, times_s: Sequence[float]) -> list[float]:
    """Seconds per stage of each pack in gradients of weights that may wait, of ``times_s`` in all.

    Those of tokens that fill a pack up are not among them.
    """
    if not _is_split(pipeline):
        return [0.0] * len(times_s)
    runs = runs_of(pipeline)
    weights_s = _sums_s(Candidate.weight_times_s, runs, [lengths_of(priced, pipeline, k) for k in range(len(runs))])
    return [min(of_pack_s, run.most_weights * time_s) for of_pack_s, run, time_s in zip(weights_s, runs, times_s)]


class PhaseTime(NamedTuple):
    """Seconds of the slowest pipeline of a phase, and of what its passes hide of an update."""

    time_s: float
    cover_s: float
    """Of the passes of the slowest pipeline that may hide a share of the update."""
    late_s: float
    """By how much pulls before and pushes after make the phase longer, whichever pipeline is the last then."""


def _phase_time(
    priced: PricedBatch, phase: Phase, all_times_s: list[list[float]], moved_s: Sequence[float]
) -> PhaseTime:
    """The seconds of a phase, in which every pipeline also has ``moved_s`` of exposed pulls and pushes.

    Pipelines that the flow shop proves to be faster are not looked at.
    """
    most_s = []
    for pipeline, times_s in zip(phase, all_times_s):
        flow_s = sum(times_s) + (pipeline.candidate.num_stages - 1) * max(times_s, default=0.0)
        most_s.append(flow_s * MIXED_RECOMPUTE if pipeline.runs else flow_s)
        if pipeline.candidate.scheme.slices > 1 or pipeline.is_in_order:
            most_s[-1] = inf  # where memory is short, slices wait for one another; a flow shop begins with the longest
    objective, slowest_s, cover_s, end_s = priced.problem.objective, 0.0, 0.0, 0.0
    for number in sorted(range(len(phase)), key=lambda number: -most_s[number]):
        is_no_later = most_s[number] <= slowest_s and most_s[number] + moved_s[number] <= end_s
        if is_no_later and objective is Objective.FLOW_SHOP:
            continue
        time_s, passes_s = draft_pipeline_s(priced, phase[number], all_times_s[number])
        end_s = max(end_s, time_s + moved_s[number])
        if time_s > slowest_s:
            slowest_s, cover_s = time_s, passes_s
    return PhaseTime(slowest_s, cover_s, end_s - slowest_s)


def issue_order(priced: PricedBatch, pipeline: PipelineDraft, times_s: list[float]) -> list[int]:
    """The numbers of a pipeline's packs in the order of a plan's micro-batches: the longest first.

    Of a pipeline of one stage, which takes as long in any order, the longest comes last where passes hide updates: the
    last backward is longer than the first forward, and more bytes are pushed beneath it than pulled. Packs that are in
    order stay in it.
    """
    if pipeline.is_in_order:
        return list(range(len(times_s)))
    ids = priced.batch.ids
    first_ids = [ids[pack[0]] if pack else -1 for pack in pipeline.packs]  # ids differ
    falling_s = [-time_s for time_s in times_s]
    order = sorted(range(len(times_s)), key=first_ids.__getitem__)
    order.sort(key=falling_s.__getitem__)  # packs of equal times stay in the order of their first ids
    is_last_longest = pipeline.candidate.num_stages == 1 and hides_updates(priced.problem.cost)
    return [*order[1:], *order[:1]] if is_last_longest else order


def moved_times_s(
    priced: PricedBatch,
    phase: Phase,
    all_times_s: list[list[float]],
    parts: UpdateParts,
    *,
    is_first: bool,
    is_last: bool,
) -> list[float]:
    """Seconds that each pipeline of a phase is later for pulls and pushes that its passes do not hide.

    The first forward and the last backward of the first stage leave the links free where they compute: not while their
    ranks exchange activations, nor in what a micro-batch takes before its first token, such as moving weights, nor
    while its gradients are reduced to shares.
    """
    orders = [issue_order(priced, pipeline, times_s) for pipeline, times_s in zip(phase, all_times_s)]
    ends = [[order[0], order[-1]] if order else [] for order in orders]
    runs = [runs_of(pipeline)[number] for pipeline, packs in zip(phase, ends) for number in packs]
    lengths = [lengths_of(priced, pipeline, number) for pipeline, packs in zip(phase, ends) for number in packs]
    comm_s = iter(comm_times_s(runs, lengths))
    moved_s = []
    for pipeline, packs, times_s in zip(phase, ends, all_times_s):
        covers_s = [0.0, 0.0]  # ranks without a micro-batch take part in what is moved
        pipeline_runs = runs_of(pipeline)
        for end, number in enumerate(packs):
            forward = 1 / pipeline_runs[number].forwards
            computed_s = max(0.0, times_s[number] - pipeline_runs[number].overhead_s - next(comm_s))
            covers_s[end] = computed_s * (1 - forward if end else forward) / pipeline_runs[number].scheme.slices
            if end and (reduction := pipeline_runs[number].reduction) is not None:
                covers_s[end] = max(0.0, covers_s[end] - reduction.whole_s)
        pulled_s = parts.exposed_pull_s(covers_s[0]) if is_first else 0.0
        moved_s.append(pulled_s + (parts.exposed_push_s(covers_s[1]) if is_last else 0.0))
    return moved_s


def comm_times_s(runs: Sequence[Candidate], lengths: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of exposed communication of packs of these lengths."""
    return _sums_s(Candidate.comm_times_s, runs, lengths)


def _sums_s(
    times_s: Callable[[Candidate, np.ndarray], np.ndarray], runs: Sequence[Candidate], lengths: Sequence[Sequence[int]]
) -> list[float]:
    """Seconds of packs of these lengths: the sums of ``times_s`` of each one's candidate and sequences."""
    sums_s = np.zeros(len(runs))
    for candidate, mine in numbers_by_candidate(runs).items():
        flat = np.fromiter(chain.from_iterable(lengths[number] for number in mine), dtype=np.int64)
        starts = [0, *accumulate(len(lengths[number]) for number in mine)][:-1]
        sums_s[mine] = np.add.reduceat(times_s(candidate, flat), starts)
    each_s: list[float] = sums_s.tolist()
    return each_s


def step_times_s(priced: PricedBatch, draft: DraftPlan) -> tuple[float, float, float]:
    """Predicted seconds of a step's phases, of the switches between them, and of its update."""
    return step_times_of(priced, draft, draft_times_s(priced, draft))


def draft_times_s(priced: PricedBatch, draft: DraftPlan) -> list[list[list[float]]]:
    """Seconds of each phase, each pipeline, each pack."""
    return [phase_times_s(priced, phase) for phase in draft.phases]


def step_times_of(
    priced: PricedBatch, draft: DraftPlan, times_s: list[list[list[float]]]
) -> tuple[float, float, float]:
    """:func:`step_times_s` from the seconds that :func:`draft_times_s` gives."""
    cost, last = priced.problem.cost, len(draft.phases) - 1
    strategies = [strategy_of(phase, priced.problem.num_devices) for phase in draft.phases]
    switch_s = sum(cost.switch_s(before, after) for before, after in pairwise(strategies))
    parts = cost.update_parts(strategies) if hides_updates(cost) else None
    phases = []
    for number, (phase, all_times_s) in enumerate(zip(draft.phases, times_s)):
        moved_s = [0.0] * len(phase)
        if parts is not None and number in (0, last):
            ends = {"is_first": number == 0, "is_last": number == last}
            moved_s = moved_times_s(priced, phase, all_times_s, parts, **ends)
        phases.append(_phase_time(priced, phase, all_times_s, moved_s))
    phases_s = sum(phase.time_s for phase in phases)
    if parts is not None:
        return phases_s, switch_s, sum(phase.late_s for phase in phases) + parts.rest_s
    if isinstance(cost, OverlappedCost):
        return phases_s, switch_s, cost.exposed_s(strategies, phases[-1].cover_s)
    return phases_s, switch_s, max(cost.update_s(strategy) for strategy in strategies)


def whole_update_s(priced: PricedBatch, draft: DraftPlan) -> float:
    """Seconds of a step's update if nothing of it were hidden; 0 where costs hide nothing."""
    cost = priced.problem.cost
    strategies = [strategy_of(phase, priced.problem.num_devices) for phase in draft.phases]
    if not isinstance(cost, OverlappedCost):
        return 0.0
    if cost.overlap is None:
        return cost.update_parts(strategies).whole_s
    return max(cost.whole_update_s(strategy) for strategy in strategies)


def time_s(priced: PricedBatch, draft: DraftPlan) -> float:
    """Predicted seconds of the whole step."""
    return sum(step_times_s(priced, draft))


def faster_with(
    priced: PricedBatch,
    drafts: Sequence[tuple[DraftPlan, float]],
    change: Callable[[PricedBatch, PipelineDraft], PipelineDraft],
) -> list[tuple[DraftPlan, float]]:
    """The draft plans with every pipeline changed, and their seconds, of those that are faster for it."""
    options = []
    for draft, draft_s in drafts:
        phases = tuple(tuple(change(priced, pipeline) for pipeline in phase) for phase in draft.phases)
        if phases != draft.phases:
            option = replace(draft, phases=phases)
            if (option_s := time_s(priced, option)) < draft_s:
                options.append((option, option_s))
    return options
