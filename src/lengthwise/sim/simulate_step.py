"""A whole step in virtual time: phases one after another, pipelines side by side in each, then one update together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import exposed_update_s
from lengthwise.core.sliced_passes import slices_of
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.sim.pipeline import PipelineRun, run_pipeline
from lengthwise.sim.sim_options import SimOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseRun:
    """The pipelines of one phase. All ranks start together and meet when the slowest pipeline ends."""

    start_s: float
    end_s: float
    pipelines: tuple[PipelineRun, ...]
    switch_end_s: float
    """When weights and gradients have moved for the next phase; ``end_s`` where nothing moves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRun:
    """A step that was executed in virtual time, before anything is told of it rank by rank."""

    plan: StepPlan
    phases: tuple[PhaseRun, ...]
    end_s: float

    @property
    def meet_s(self) -> float:
        """When the slowest rank has its gradients and the update starts."""
        return self.phases[-1].end_s


def run_step(plan: StepPlan, options: SimOptions) -> StepRun:
    """Execute a plan.

    Raises:
        InputError: a straggler is not a rank of the plan.
    """
    for rank in options.stragglers:
        if not 0 <= rank < plan.num_devices:
            raise InputError(
                f"there is no rank {rank} to be slow: the plan of step {plan.step} has {plan.num_devices} ranks, "
                f"0 to {plan.num_devices - 1}"
            )
    slowdowns = _slowdowns(plan, options)
    switch_s = plan.switch_s / max(1, plan.num_phases - 1)
    phases: list[PhaseRun] = []
    start_s = 0.0
    for number in range(plan.num_phases):
        runs = tuple(
            run_pipeline(pipeline, factors, start_s=start_s, transfer_s=options.transfer_s)
            for pipeline, factors in zip(plan.pipelines, slowdowns)
            if pipeline.phase == number
        )
        end_s = max(run.end_s for run in runs)
        next_s = end_s if number == plan.num_phases - 1 else end_s + switch_s
        phases.append(PhaseRun(start_s=start_s, end_s=end_s, pipelines=runs, switch_end_s=next_s))
        start_s = next_s
    update_s = plan.update_s
    if options.overlap is not None:
        update_s = exposed_update_s(update_s + plan.hidden_update_s, _cover_s(phases[-1]), options.overlap)
    end_s = start_s + update_s
    return StepRun(plan=plan, phases=tuple(phases), end_s=end_s)


def _cover_s(phase: PhaseRun) -> float:
    """Seconds of the two passes that may hide the update, of the pipeline that ends last; see ``update_cover_s``."""
    passes = max(phase.pipelines, key=lambda run: run.end_s).stages[0]
    return passes[0].end_s - passes[0].start_s + passes[-1].end_s - passes[-1].start_s if passes else 0.0


def _slowdowns(plan: StepPlan, options: SimOptions) -> list[Sequence[Sequence[float]]]:
    """[S][N] per pipeline: the slowest rank of each stage, times the jitter of each micro-batch there."""
    noise = np.random.Generator(np.random.Philox(key=np.array([options.seed, plan.step], dtype=np.uint64)))
    slowdowns: list[Sequence[Sequence[float]]] = []
    for pipeline in plan.pipelines:
        slowest = _slowest_ranks(pipeline, options)
        slices = slices_of(pipeline)
        if options.jitter:
            draws = noise.standard_normal((len(slowest), len(pipeline.micro_batches)))
            factors = np.exp(options.jitter * draws - options.jitter**2 / 2) * np.array(slowest)[:, None]
            slowdowns.append(factors[:, [part.micro_batch for part in slices]].tolist())
        else:
            slowdowns.append([[factor] * len(slices) for factor in slowest])
    return slowdowns


def _slowest_ranks(pipeline: Pipeline, options: SimOptions) -> list[float]:
    """[S] how many times slower the slowest rank of each stage is."""
    degree, ranks = pipeline.scheme.degree, pipeline.ranks
    if not options.stragglers:
        return [1.0] * pipeline.scheme.num_stages
    factors = [options.stragglers.get(rank, 1.0) for rank in ranks]
    return [max(factors[first : first + degree]) for first in range(0, len(ranks), degree)]
