"""Simulate a step: execute its plan in virtual time and return the same Timeline as the runtime."""

from collections.abc import Iterable, Iterator

from lengthwise.core.one_f_one_b import StagePass
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline
from lengthwise.sim.pipeline import PipelineRun
from lengthwise.sim.sim_options import EXACT, SimOptions
from lengthwise.sim.simulate_step import PhaseRun, run_step

BUBBLE = "bubble"
"""Name of the waits of a stage for other stages of its pipeline."""
IMBALANCE = "wait"
"""Name of the waits of a pipeline for other pipelines."""
SWITCH = "switch"
"""Name of the communication between two phases."""

RankActivity = tuple[float, float, SpanKind, str]
"""Start, end, kind and name of what all ranks of a stage do."""


def simulate(plan: StepPlan, options: SimOptions = EXACT) -> Timeline:
    """Execute a plan in virtual time: what every rank does when, and the bytes it holds.

    The spans of a rank follow one another without gaps, from the start of the step to its end. Memory is sampled at the
    start of each phase and at every change.

    Raises:
        InputError: a straggler is not a rank of the plan.
    """
    step = run_step(plan, options)
    spans: list[Span] = []
    memory: list[MemorySample] = []
    for phase, strategy in zip(step.phases, plan.strategies):
        idle = range(plan.num_devices - strategy.num_idle, plan.num_devices)
        spans += _on_ranks(idle, _after(phase.start_s, phase))
        for run in phase.pipelines:
            for stage in range(len(run.stages)):
                ranks = run.pipeline.ranks_of(stage)
                spans += _on_ranks(ranks, _activities(run, stage, phase))
                memory += [
                    MemorySample(time_s=time_s, rank=rank, num_bytes=num_bytes)
                    for time_s, num_bytes in run.memory_of(stage)
                    for rank in ranks
                ]
    spans += _on_ranks(range(plan.num_devices), _lasting(step.meet_s, step.end_s, SpanKind.UPDATE, "update"))
    return Timeline(step=plan.step, num_ranks=plan.num_devices, spans=tuple(spans), memory=tuple(memory))


def _on_ranks(ranks: Iterable[int], activities: Iterable[RankActivity]) -> Iterator[Span]:
    for start_s, end_s, kind, name in activities:
        for rank in ranks:
            yield Span(start_s=start_s, end_s=end_s, rank=rank, kind=kind, name=name)


def _activities(run: PipelineRun, stage: int, phase: PhaseRun) -> Iterator[RankActivity]:
    """What the ranks of a stage do from the start of a phase to the start of the next."""
    now_s = phase.start_s
    for stage_pass in run.stages[stage]:
        yield from _lasting(now_s, stage_pass.start_s, SpanKind.WAIT, BUBBLE)
        yield from _pass(stage_pass, run.slices[stage_pass.number].name, run.comm_share(stage, stage_pass))
        now_s = stage_pass.end_s
    yield from _lasting(now_s, run.end_s, SpanKind.WAIT, BUBBLE)
    yield from _after(run.end_s, phase)


def _after(now_s: float, phase: PhaseRun) -> Iterator[RankActivity]:
    """What ranks do that have nothing more to compute in a phase."""
    yield from _lasting(now_s, phase.end_s, SpanKind.WAIT, IMBALANCE)
    yield from _lasting(phase.end_s, phase.switch_end_s, SpanKind.COMMUNICATE, SWITCH)


def _pass(stage_pass: StagePass, of_what: str, comm_share: float) -> Iterator[RankActivity]:
    """A pass: first what computes, then what only communicates."""
    name = f"{stage_pass.kind.word} {of_what}"
    computed_s = max(stage_pass.start_s, stage_pass.end_s - comm_share * (stage_pass.end_s - stage_pass.start_s))
    yield from _lasting(stage_pass.start_s, computed_s, SpanKind.COMPUTE, name)
    yield from _lasting(computed_s, stage_pass.end_s, SpanKind.COMMUNICATE, name)


def _lasting(start_s: float, end_s: float, kind: SpanKind, name: str) -> Iterator[RankActivity]:
    if end_s > start_s:
        yield start_s, end_s, kind, name
