"""What the benchmark of pipelines runs on its two ranks: a profile, and steps of plans of two stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch.distributed as dist
from switching_runs import Tokens, world

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import ProfileTable
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import PipelineConfig, uniform_scheme
from lengthwise.core.profile_packs import ladder
from lengthwise.core.specs import ModelSpec, cluster_preset
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import Timeline
from lengthwise.cost.profiled.fitted import FittedCost
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup, PlacedStrategy
from lengthwise.plan.space.candidate import make_candidates
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.finished_plan import to_plan
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import Pack
from lengthwise.plan.uniform.static import static
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.profile.measure import profile
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step, sync_step

STAGES = 2
SPEC = ModelSpec(
    name="pipeline", num_layers=8, hidden_size=128, ffn_size=384, num_heads=4, num_kv_heads=2, head_size=32,
    vocab_size=256,
)  # fmt: skip
SCHEME = uniform_scheme(SPEC.num_layers, stages=STAGES)
CAPACITY = 2048
"""Most tokens of a pack."""
TOKENS = 9 * CAPACITY
"""Of a step."""
LR, CLIP = 1e-4, 1.0


@dataclass(frozen=True)
class Lengths:
    """Drawn like those of a corpus, and cut."""

    corpus: str
    longest: int
    fixed: tuple[int, ...] = ()
    """These in every step, instead."""

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.corpus}, cut at {self.longest:,}"


def batch_of(drawn: Lengths, step: int) -> GlobalBatch:
    """``TOKENS`` tokens in all, the last sequence cut to fit, unless lengths are fixed."""
    if drawn.fixed:
        return GlobalBatch(step=step, ids=tuple(range(len(drawn.fixed))), lengths=drawn.fixed)
    lengths: list[int] = []
    for length in np.minimum(synthetic_lengths(drawn.corpus, 1 + TOKENS // 16, step)[1:], drawn.longest).tolist():
        lengths.append(min(length, TOKENS - sum(lengths)))
        if sum(lengths) == TOKENS:
            break
    return GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths))


def stage_cost(table: ProfileTable, scheme: PipelineConfig = SCHEME) -> FittedCost:
    """Of a stage of equally many layers: so many of what one device took for the whole model."""
    stages = scheme.num_stages
    rows = [replace(row, time_s=row.time_s / stages, kept_bytes=row.kept_bytes // stages) for row in table.rows]
    shared = replace(table, rows=tuple(rows), update_s=0.0)
    return FittedCost([(scheme, shared)], model=SPEC, cluster=cluster_preset(f"{stages}xcpu"))


def problem_of(cost: FittedCost, scheme: PipelineConfig = SCHEME, *, capacity: int = CAPACITY) -> PlanningProblem:
    """One pipeline, packs of at most ``capacity`` tokens."""
    candidates = make_candidates([scheme], cost, num_devices=scheme.num_stages, token_limit=capacity)
    return PlanningProblem(
        candidates=candidates, num_devices=scheme.num_stages, devices_per_node=scheme.num_stages,
        memory_bytes=cost.cluster.device.memory_bytes,
        max_length=capacity,
    )  # fmt: skip


def balanced(problem: PlanningProblem, batch: GlobalBatch) -> StepPlan:
    """Our packer: packs of equal cost, as many as end earliest."""
    priced = PricedBatch(problem, batch)
    phase, found = PlacedStrategy(problem, [PipelineGroup(candidate=problem.candidates[0], count=1)]).assign(priced)
    return to_plan(priced, DraftPlan(phases=(phase,), lower_bound_s=found.lower_bound), policy="balanced")


def filled(problem: PlanningProblem, batch: GlobalBatch) -> StepPlan:
    """Packs of equal length, first fit decreasing, the costliest first: what policy ``static`` runs."""
    priced = PricedBatch(problem, batch)
    return to_plan(priced, static(problem, problem.candidates[0])(priced), policy="filled")


def as_they_come(problem: PlanningProblem, batch: GlobalBatch) -> StepPlan:
    """Packs of equal length, each sequence into the first with room, in the order of the stream."""
    plan = to_plan(*_arranged(problem, batch, first_fit(batch.lengths, CAPACITY)), policy="as they come")
    pipeline = plan.pipelines[0]
    in_order = sorted(pipeline.micro_batches, key=lambda m: min(m.pack.ids))
    return replace(plan, pipelines=(replace(pipeline, micro_batches=tuple(in_order)),))


def _arranged(problem: PlanningProblem, batch: GlobalBatch, packs: Sequence[Pack]) -> tuple[PricedBatch, DraftPlan]:
    pipeline = PipelineDraft(candidate=problem.candidates[0], ranks=tuple(range(STAGES)), packs=tuple(packs))
    return PricedBatch(problem, batch), DraftPlan(phases=((pipeline,),), lower_bound_s=0.0)


def first_fit(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Positions of the sequences of each pack."""
    packs: list[list[int]] = []
    room: list[int] = []
    for position, length in enumerate(lengths):
        at = next((number for number, left in enumerate(room) if length <= left), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(capacity)
        packs[at].append(position)
        room[at] -= length
    return [tuple(pack) for pack in packs]


@cache
def trained() -> tuple[Transformer, ShardedState]:
    """The model and its state, made once per process."""
    model = build_model(SPEC, seed=0)
    return model, ShardedState(model, world(), OptimizerSettings())


def measured_profile(*, repeats: int) -> ProfileTable:
    """Of the whole model on one device, both ranks at once, as ``lengthwise profile`` takes it."""
    packs = ladder(CAPACITY, CAPACITY)
    return profile(build_model(SPEC, seed=0), SPEC, world(), packs=packs, recompute=False, repeats=repeats)


def one_step(plan: StepPlan, drawn: Lengths, schedule: PipelineSchedule) -> Timeline:
    """Train one step; what this rank recorded."""
    model, state = trained()
    source = Tokens(batch_of(drawn, plan.step), SPEC.vocab_size)
    dist.barrier()
    clock = StepClock(world())
    sync_step(plan, world(), clock, stop=False)
    run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=clock, schedule=schedule)
    return clock.timeline(plan.step)
