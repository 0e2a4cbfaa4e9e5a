"""Draft plans: which pipelines compute which sequences, as positions in the batch; priced, then made a step plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import NoReturn

import numpy as np

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.one_f_one_b import MIXED_RECOMPUTE, pipeline_end_s, update_cover_s
from lengthwise.core.pipeline_config import Strategy
from lengthwise.core.step_plan import Pipeline, PlannedMicroBatch, StepPlan
from lengthwise.cost.overlapped import OverlappedCost
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineDraft:
    """One pipeline and the packs it computes."""

    candidate: Candidate
    ranks: tuple[int, ...]
    packs: tuple[tuple[int, ...], ...] = ()
    """Positions in the batch of each pack's sequences."""
    runs: tuple[Candidate, ...] = ()
    """The candidate each pack runs as, of the family of ``candidate``; empty: all as ``candidate``."""
    padded_to: tuple[int, ...] = ()
    """Tokens that each pack's sequences are padded to; empty: none is."""
    rows: int = 0
    """Sequences that each padded pack is laid out as, the last ones of padding alone; 0: as many as it has."""


Phase = tuple[PipelineDraft, ...]
"""Pipelines side by side, on the first ranks of the cluster, if not on all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftPlan:
    """Who computes what in one step."""

    phases: tuple[Phase, ...]
    lower_bound_s: float = 0.0
    """Seconds that no plan of the schemes the policy may use is faster than, its update included; 0: none is proven."""


def pack_times_s(priced: PricedBatch, pipeline: PipelineDraft) -> list[float]:
    """Seconds per stage of each pack of the pipeline, overhead included."""
    return phase_times_s(priced, (pipeline,))[0]


def phase_times_s(priced: PricedBatch, phase: Phase) -> list[list[float]]:
    """Seconds per stage of each pack of each pipeline, overhead included."""
    times_s = _times_without_filler_s(priced, phase)
    if priced.problem.lattice is None:
        return times_s
    return [
        [time_s + more_s for time_s, more_s in zip(packs_s, _filler_times_s(priced, pipeline))]
        for pipeline, packs_s in zip(phase, times_s)
    ]


def _times_without_filler_s(priced: PricedBatch, phase: Phase) -> list[list[float]]:
    """The packs of all pipelines that run as one candidate are priced together."""
    packs = [pack for pipeline in phase if not pipeline.padded_to for pack in pipeline.packs]
    runs = [run for pipeline in phase if not pipeline.padded_to for run in runs_of(pipeline)]
    sums_s = np.zeros(len(packs))
    for candidate, mine in numbers_by_candidate(runs).items():
        packs_of_candidate = [packs[number] for number in mine]
        starts = [0, *accumulate(map(len, packs_of_candidate))][:-1]
        positions = list(chain.from_iterable(packs_of_candidate))
        sums_s[mine] = np.add.reduceat(priced.times_s(candidate)[positions], starts) + priced.overhead_s(candidate)
    each_s = iter(sums_s.tolist())
    return [
        _padded_times_s(priced, pipeline) if pipeline.padded_to else list(islice(each_s, len(pipeline.packs)))
        for pipeline in phase
    ]


def _padded_times_s(priced: PricedBatch, pipeline: PipelineDraft) -> list[float]:
    each_s = pipeline.candidate.times_s(np.array(pipeline.padded_to)).tolist()
    overhead_s, per_sequence = pipeline.candidate.overhead_s, priced.problem.overhead_per_sequence
    counts = [max(pipeline.rows, len(pack)) for pack in pipeline.packs]
    return [time_s * count + overhead_s * (count if per_sequence else 1) for time_s, count in zip(each_s, counts)]


def runs_of(pipeline: PipelineDraft) -> tuple[Candidate, ...]:
    """The candidate that each pack runs as."""
    return pipeline.runs or (pipeline.candidate,) * len(pipeline.packs)


def numbers_by_candidate(runs: Sequence[Candidate]) -> dict[Candidate, list[int]]:
    """Which packs run as each candidate."""
    numbers: dict[Candidate, list[int]] = {}
    for number, run in enumerate(runs):
        numbers.setdefault(run, []).append(number)
    return numbers


def _laid_out(priced: PricedBatch, pipeline: PipelineDraft) -> Iterator[tuple[int, int]]:
    """Tokens of each pack, padding of sequences included, and tokens of its longest sequence."""
    for number, pack in enumerate(pipeline.packs):
        if pipeline.padded_to:
            yield pipeline.padded_to[number] * max(pipeline.rows, len(pack)), pipeline.padded_to[number]
        else:
            lengths = [priced.batch.lengths[position] for position in pack]
            yield sum(lengths), max(lengths)


def fillers(priced: PricedBatch, pipeline: PipelineDraft) -> list[int]:
    """Tokens of padding that bring each pack of the pipeline to a size of the lattice; 0 where it fits none."""
    lattice = priced.problem.lattice
    if lattice is None:
        return [0] * len(pipeline.packs)
    tokens = [tokens for tokens, _ in _laid_out(priced, pipeline)]
    return [lattice.size_of(num_tokens) - num_tokens if num_tokens <= lattice.sizes[-1] else 0 for num_tokens in tokens]


def _filler_times_s(priced: PricedBatch, pipeline: PipelineDraft) -> list[float]:
    """Seconds per stage that filling up adds to each pack of the pipeline."""
    longest = np.array([longest for _, longest in _laid_out(priced, pipeline)], dtype=np.int64)
    wholes, rests = np.divmod(np.array(fillers(priced, pipeline), dtype=np.int64), longest)
    added_s = np.zeros(len(pipeline.packs))
    for candidate, mine in numbers_by_candidate(runs_of(pipeline)).items():
        rests_s = np.where(rests[mine] > 0, candidate.times_s(np.maximum(rests[mine], 1)), 0.0)
        added_s[mine] = wholes[mine] * candidate.times_s(longest[mine]) + rests_s
    each_s: list[float] = added_s.tolist()
    return each_s


def pipeline_time_s(
    times_s: Sequence[float], num_stages: int, objective: Objective, *, forwards: Sequence[float]
) -> float:
    """Seconds of a pipeline under 1F1B, or as Hydraulis' Eq. (1) counts them.

    Args:
        times_s: seconds per stage of its packs, the longest first.
        num_stages: of the pipeline.
        objective: which of the two.
        forwards: how many forwards each pack takes as long as.
    """
    if not times_s:
        return 0.0
    if objective is Objective.MAX_TIMES_COUNT:
        return max(times_s) * (num_stages - 1 + len(times_s))
    return pipeline_end_s(times_s, forwards, num_stages)


def _phase_time_s(priced: PricedBatch, phase: Phase, all_times_s: list[list[float]]) -> tuple[float, float]:
    """Seconds of the slowest pipeline, and of its passes that may hide an update.

    Pipelines that the flow shop proves to be faster are not looked at.
    """
    cover_s, most_s = 0.0, []
    for pipeline, times_s in zip(phase, all_times_s):
        flow_s = sum(times_s) + (pipeline.candidate.num_stages - 1) * max(times_s, default=0.0)
        most_s.append(flow_s * MIXED_RECOMPUTE if pipeline.runs else flow_s)
    objective, slowest_s = priced.problem.objective, 0.0
    for number in sorted(range(len(phase)), key=lambda number: -most_s[number]):
        if most_s[number] <= slowest_s and objective is Objective.FLOW_SHOP:
            break
        pipeline, times_s = phase[number], all_times_s[number]
        runs = runs_of(pipeline)
        order = list(range(len(times_s)))
        if pipeline.candidate.num_stages > 1:
            order = sorted(order, key=lambda k: (-times_s[k], tuple([priced.batch.ids[i] for i in pipeline.packs[k]])))
        ordered_s, forwards = [times_s[k] for k in order], [runs[k].forwards for k in order]
        time_s = pipeline_time_s(ordered_s, pipeline.candidate.num_stages, objective, forwards=forwards)
        if time_s > slowest_s:
            slowest_s, cover_s = time_s, update_cover_s(ordered_s, forwards)
    return slowest_s, cover_s


def step_times_s(priced: PricedBatch, draft: DraftPlan) -> tuple[float, float, float]:
    """Predicted seconds of a step's phases, of the switches between them, and of its update."""
    return _step_times_s(priced, draft, _times_s(priced, draft))


def _times_s(priced: PricedBatch, draft: DraftPlan) -> list[list[list[float]]]:
    """Seconds of each phase, each pipeline, each pack."""
    return [phase_times_s(priced, phase) for phase in draft.phases]


def _step_times_s(
    priced: PricedBatch, draft: DraftPlan, times_s: list[list[list[float]]]
) -> tuple[float, float, float]:
    phases = [_phase_time_s(priced, phase, pipelines_s) for phase, pipelines_s in zip(draft.phases, times_s)]
    phases_s, cost = sum(time_s for time_s, _ in phases), priced.problem.cost
    strategies = [strategy_of(phase, priced.problem.num_devices) for phase in draft.phases]
    switch_s = sum(cost.switch_s(before, after) for before, after in pairwise(strategies))
    if isinstance(cost, OverlappedCost):
        return phases_s, switch_s, max(cost.exposed_s(strategy, phases[-1][1]) for strategy in strategies)
    return phases_s, switch_s, max(cost.update_s(strategy) for strategy in strategies)


def time_s(priced: PricedBatch, draft: DraftPlan) -> float:
    """Predicted seconds of the whole step."""
    return sum(step_times_s(priced, draft))


def strategy_of(phase: Phase, num_devices: int) -> Strategy:
    """Schemes and ranks of a phase on a cluster of ``num_devices``."""
    return Strategy(
        schemes=tuple(pipeline.candidate.scheme for pipeline in phase),
        ranks=tuple(pipeline.ranks for pipeline in phase),
        num_idle=num_devices - sum(len(pipeline.ranks) for pipeline in phase),
    )


def to_plan(priced: PricedBatch, draft: DraftPlan, *, policy: str) -> StepPlan:
    """The plan made of a draft: priced, in issue order, checked to compute each sequence once and to fit.

    Raises:
        InfeasibleError: a pack exceeds a device's memory.
    """
    batch = priced.batch
    times_s = _times_s(priced, draft)
    phases_s, switch_s, update_s = _step_times_s(priced, draft, times_s)
    time_s, bound_s = phases_s + switch_s + update_s, draft.lower_bound_s or update_s
    assert bound_s <= time_s * (1 + 1e-9), f"the bound {bound_s} exceeds the plan it bounds, {time_s}"
    packs = [[_packs(priced, pipeline) for pipeline in phase] for phase in draft.phases]
    figures = iter(_figures(priced, draft, packs, policy))
    plan = StepPlan(
        step=batch.step,
        policy=policy,
        pipelines=tuple(
            Pipeline(
                ranks=pipeline.ranks,
                scheme=pipeline.candidate.scheme,
                micro_batches=_micro_batches(pipeline, packs[number][index], times_s[number][index], figures),
                phase=number,
                state_bytes=pipeline.candidate.state_bytes,
            )
            for number, phase in enumerate(draft.phases)
            for index, pipeline in enumerate(phase)
        ),
        loss_normaliser=max(1, batch.num_targets),
        update_s=update_s,
        switch_s=switch_s,
        num_devices=priced.problem.num_devices,
        time_s=time_s,
        lower_bound_s=min(time_s, bound_s),  # sums in another order round differently
    )
    plan.check_covers(batch)
    return plan


def _packs(priced: PricedBatch, pipeline: PipelineDraft) -> list[Pack]:
    batch = priced.batch
    return [
        Pack(
            ids=tuple([batch.ids[i] for i in positions]),
            lengths=tuple([batch.lengths[i] for i in positions]),
            padded_to=pipeline.padded_to[number] if pipeline.padded_to else 0,
            rows=pipeline.rows,
            filler=filler,
        )
        for number, (positions, filler) in enumerate(zip(pipeline.packs, fillers(priced, pipeline)))
    ]


def _figures(
    priced: PricedBatch, draft: DraftPlan, packs: list[list[list[Pack]]], policy: str
) -> list[tuple[float, int]]:
    """Seconds of exposed communication and peak bytes of every pack of a draft plan, checked to fit."""
    runs = [run for phase in draft.phases for pipeline in phase for run in runs_of(pipeline)]
    flat = [pack for phase in packs for pipeline in phase for pack in pipeline]
    tokens = np.array([pack.num_tokens for pack in flat], dtype=np.int64)
    comm_s, peaks = np.zeros(len(flat)), np.zeros(len(flat), dtype=np.int64)
    for candidate, mine in numbers_by_candidate(runs).items():
        if (longest := int(tokens[mine].max())) > candidate.max_tokens:
            _refuse(priced.problem, candidate, flat[mine[int(tokens[mine].argmax())]], longest, policy)
        peaks[mine] = candidate.peak_bytes(tokens[mine])
        lengths = [flat[number].computed_lengths for number in mine]
        each_s = candidate.cost.comm_times_s(
            np.fromiter(chain.from_iterable(lengths), dtype=np.int64), candidate.scheme
        )
        comm_s[mine] = np.add.reduceat(each_s, [0, *accumulate(map(len, lengths))][:-1])
    return list(zip(comm_s.tolist(), peaks.tolist()))


def _micro_batches(
    pipeline: PipelineDraft, packs: list[Pack], times_s: list[float], figures: Iterator[tuple[float, int]]
) -> tuple[PlannedMicroBatch, ...]:
    """The packs of a pipeline in issue order; takes one item of ``figures`` for each."""
    scheme = pipeline.candidate.scheme
    micro_batches = [
        PlannedMicroBatch(
            pack=pack,
            time_s=time_s,
            comm_s=min(comm_s, time_s),  # that of a unit is counted as of one sequence
            peak_bytes=peak_bytes,
            methods=None if run.scheme.methods == scheme.methods else run.scheme.methods,
            recompute=None if run.scheme.recompute == scheme.recompute else run.scheme.recompute,
            offload=None if run.scheme.offload == scheme.offload else run.scheme.offload,
            tile_tokens=None if run.scheme.tile_tokens == scheme.tile_tokens else run.scheme.tile_tokens,
            head_groups=None if run.scheme.head_groups == scheme.head_groups else run.scheme.head_groups,
        )
        for pack, run, time_s, (comm_s, peak_bytes) in zip(packs, runs_of(pipeline), times_s, figures)
    ]
    return tuple(sorted(micro_batches, key=lambda m: (-m.time_s, m.pack.ids)))


def _refuse(problem: PlanningProblem, candidate: Candidate, pack: Pack, num_tokens: int, policy: str) -> NoReturn:
    """Say that a pack fits under no scheme that the policy may run it as."""
    padded = f" padded to {pack.padded_to:,} tokens ({num_tokens:,} in all)" if pack.padded_to else ""
    smaller = f"{Setting.BATCH_SIZE} or " if problem.batch_size else ""
    raise InfeasibleError(
        f"policy {policy}: a micro-batch of {len(pack.ids)} sequences{padded} "
        f"{problem.needs(candidate, num_tokens)} Lower {smaller}{Setting.MAX_LENGTH}.",
        what="a micro-batch", value=num_tokens, limit=candidate.max_tokens, unit="tokens",
    )  # fmt: skip
