"""Traces of simulated steps: for Perfetto, as PyTorch's profiler writes them, and as input of network simulators."""

from collections.abc import Sequence
from pathlib import Path

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan, most_devices
from lengthwise.core.timeline import Timeline
from lengthwise.report.chakra import write_chakra
from lengthwise.report.chrome_trace import MOST_SPANS, write_trace
from lengthwise.report.kineto import write_kineto
from lengthwise.report.trace_choice import RANKS_OPTION, TraceChoice
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import SimOptions


def write_traces(
    plans: Sequence[StepPlan], options: SimOptions, choice: TraceChoice, *, trace: Path | None, kineto: Path | None
) -> str:
    """Simulate the chosen steps and write the traces that have a place.

    Returns:
        A sentence if not all the chosen steps were written: viewers bear no more; else nothing.

    Raises:
        InputError: a chosen step or rank is not in the plans, or a place cannot be written.
    """
    chosen = {plan.step: plan for plan in _chosen(plans, choice)}
    timelines = _timelines(list(chosen.values()), options, choice)
    ranks = choice.ranks_among(most_devices(list(chosen.values())))
    if trace is not None:
        write_trace(trace, [], predicted=timelines, plans=chosen, ranks=ranks)
    if kineto is not None:
        write_kineto(kineto, timelines, plans=chosen, ranks=ranks)
    if len(timelines) == len(chosen):
        return ""
    return f"{trace or kineto} holds the first {len(timelines):,} of {len(chosen):,} steps; viewers bear no more"


def write_execution_traces(
    folder: Path, plans: Sequence[StepPlan], choice: TraceChoice, model: tuple[ModelSpec, str]
) -> None:
    """Write Chakra execution traces of the chosen steps on all ranks; ``model`` is its sizes and its compute dtype.

    Raises:
        InputError: a chosen step is not in the plans, they are of another model, or ranks are chosen.
    """
    if choice.ranks is not None:
        raise InputError(f"--chakra writes all ranks, which wait for one another; take {RANKS_OPTION} out")
    spec, dtype = model
    write_chakra(folder, _chosen(plans, choice), spec, dtype=dtype)


def _chosen(plans: Sequence[StepPlan], choice: TraceChoice) -> list[StepPlan]:
    """The plans of the chosen steps; raises ``InputError`` for a step or rank that is not in them."""
    chosen = [plan for plan in plans if choice.has_step(plan.step)]
    choice.check(steps=[plan.step for plan in plans], num_ranks=most_devices(chosen or plans))
    return chosen


def _timelines(plans: Sequence[StepPlan], options: SimOptions, choice: TraceChoice) -> list[Timeline]:
    """Simulate the first steps, at least one, as many as viewers bear of the chosen ranks."""
    timelines: list[Timeline] = []
    num_spans = 0
    for plan in plans:
        timeline = simulate(plan, options)
        num_spans += sum(choice.has_rank(span.rank) for span in timeline.spans)
        if timelines and num_spans > MOST_SPANS:
            break
        timelines.append(timeline)
    return timelines
