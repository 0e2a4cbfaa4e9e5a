"""A draft plan as a step plan: its packs in issue order with their predicted seconds and bytes, checked to fit."""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.token_placement import Placement
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import (
    DraftPlan,
    PipelineDraft,
    fillers,
    longest_first,
    numbers_by_candidate,
    runs_of,
)
from lengthwise.plan.space.draft_times import (
    comm_times_s,
    draft_times_s,
    issue_order,
    placements,
    step_times_of,
    weight_times_s,
    whole_update_s,
)
from lengthwise.plan.space.placed_sequences import PlacedPack
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.sliced_packs import cut_pack


def to_plan(priced: PricedBatch, draft: DraftPlan, *, policy: str) -> StepPlan:
    """The plan made of a draft: priced, in issue order, checked to compute each sequence once and to fit.

    Raises:
        InfeasibleError: a pack exceeds a device's memory.
    """
    batch = priced.batch
    times_s = draft_times_s(priced, draft)
    phases_s, switch_s, update_s = step_times_of(priced, draft, times_s)
    time_s, bound_s = phases_s + switch_s + update_s, draft.lower_bound_s or update_s
    assert bound_s <= time_s * (1 + 1e-9), f"the bound {bound_s} exceeds the plan it bounds, {time_s}"
    packs = [[_packs(priced, pipeline) for pipeline in phase] for phase in draft.phases]
    placed = [of_pack for phase in draft.phases for pipeline in phase for of_pack in placements(priced, pipeline)]
    figures = iter(_figures(priced, draft, packs, placed, policy))
    plan = StepPlan(
        step=batch.step,
        policy=policy,
        pipelines=tuple(
            Pipeline(
                ranks=pipeline.ranks,
                scheme=pipeline.candidate.scheme,
                micro_batches=_micro_batches(priced, pipeline, packs[number][index], times_s[number][index], figures),
                phase=number,
                state_bytes=pipeline.candidate.state_bytes,
            )
            for number, phase in enumerate(draft.phases)
            for index, pipeline in enumerate(phase)
        ),
        loss_normaliser=max(1, batch.num_targets),
        update_s=update_s,
        hidden_update_s=max(0.0, whole_update_s(priced, draft) - update_s),
        switch_s=switch_s,
        num_devices=priced.problem.num_devices,
        time_s=time_s,
        lower_bound_s=min(time_s, bound_s),  # sums in another order round differently
    )
    plan.check_covers(batch)
    return plan


def _packs(priced: PricedBatch, pipeline: PipelineDraft) -> list[Pack]:
    batch, is_cut = priced.batch, pipeline.candidate.scheme.slices > 1
    in_order = [longest_first(batch.lengths, pack) if is_cut else pack for pack in pipeline.packs]
    return [
        Pack(
            ids=tuple([batch.ids[i] for i in positions]),
            lengths=tuple([batch.lengths[i] for i in positions]),
            padded_to=pipeline.padded_to[number] if pipeline.padded_to else 0,
            rows=pipeline.rows,
            filler=filler,
        )
        for number, (positions, filler) in enumerate(zip(in_order, fillers(priced, pipeline)))
    ]


def _figures(
    priced: PricedBatch,
    draft: DraftPlan,
    packs: list[list[list[Pack]]],
    placed: list[PlacedPack | None],
    policy: str,
) -> list[tuple[float, int, Placement]]:
    """Seconds of exposed communication, peak bytes and placement of every pack of a draft plan, checked to fit."""
    runs = [run for phase in draft.phases for pipeline in phase for run in runs_of(pipeline)]
    flat = [pack for phase in packs for pipeline in phase for pack in pipeline]
    tokens = np.array(
        [
            pack.num_tokens if of_pack is None else max(pack.num_tokens, (of_pack.most_tokens - 1) * degree + 1)
            for pack, of_pack, degree in zip(flat, placed, [run.scheme.degree for run in runs])
        ],
        dtype=np.int64,
    )
    peaks = np.zeros(len(flat), dtype=np.int64)
    for candidate, mine in numbers_by_candidate(runs).items():
        if (longest := int(tokens[mine].max())) > candidate.max_tokens:
            _refuse(priced.problem, candidate, flat[mine[int(tokens[mine].argmax())]], longest, policy)
        peaks[mine] = candidate.peak_bytes(tokens[mine])
    comm_s = comm_times_s(runs, [pack.computed_lengths for pack in flat])
    reduced_s = (0.0 if run.reduction is None else run.reduction.least_s for run in runs)
    return [
        (exposed_s + more_s, peak, () if of_pack is None else of_pack.placement)
        for exposed_s, more_s, peak, of_pack in zip(comm_s, reduced_s, peaks.tolist(), placed)
    ]


def _micro_batches(
    priced: PricedBatch,
    pipeline: PipelineDraft,
    packs: list[Pack],
    times_s: list[float],
    figures: Iterator[tuple[float, int, Placement]],
) -> tuple[PlannedMicroBatch, ...]:
    """The packs of a pipeline in issue order; takes one item of ``figures`` for each."""
    scheme = pipeline.candidate.scheme
    weights_s = iter(weight_times_s(priced, pipeline, times_s))
    micro_batches = [
        PlannedMicroBatch(
            pack=pack,
            time_s=time_s,
            weights_s=next(weights_s),
            slices=cut_pack(run, pack.computed_lengths, time_s),
            comm_s=min(comm_s, time_s),  # that of a unit is counted as of one sequence
            peak_bytes=peak_bytes,
            methods=None if run.scheme.methods == scheme.methods else run.scheme.methods,
            recompute=None if run.scheme.recompute == scheme.recompute else run.scheme.recompute,
            offload=None if run.scheme.offload == scheme.offload else run.scheme.offload,
            tile_tokens=None if run.scheme.tile_tokens == scheme.tile_tokens else run.scheme.tile_tokens,
            keep_attention=None if run.scheme.keep_attention == scheme.keep_attention else run.scheme.keep_attention,
            head_groups=None if run.scheme.head_groups == scheme.head_groups else run.scheme.head_groups,
            placement=placement,
        )
        for pack, run, time_s, (comm_s, peak_bytes, placement) in zip(packs, runs_of(pipeline), times_s, figures)
    ]
    return tuple([micro_batches[number] for number in issue_order(priced, pipeline, times_s)])


def _refuse(problem: PlanningProblem, candidate: Candidate, pack: Pack, num_tokens: int, policy: str) -> NoReturn:
    """Say that a pack fits under no scheme that the policy may run it as."""
    padded = f" padded to {pack.padded_to:,} tokens ({num_tokens:,} in all)" if pack.padded_to else ""
    smaller = f"{Setting.BATCH_SIZE} or " if problem.batch_size else ""
    raise InfeasibleError(
        f"policy {policy}: a micro-batch of {len(pack.ids)} sequences{padded} "
        f"{problem.needs(candidate, num_tokens)} Lower {smaller}{Setting.MAX_LENGTH}.",
        what="a micro-batch", value=num_tokens, limit=candidate.max_tokens, unit="tokens",
    )  # fmt: skip
