"""`lengthwise simulate`: execute plans in virtual time; needs no torch."""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import fsum
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lengthwise.cli.commands.plan import DEFAULT_STEPS, plan_steps
from lengthwise.cli.commands.report import MOST_SPANS
from lengthwise.cli.launch import split_arguments
from lengthwise.config.run_config import MAX_STEPS, load
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.read_file import brief
from lengthwise.core.run_folder import read_jsonl
from lengthwise.core.specs import GIB, whole_number
from lengthwise.core.step_plan import StepPlan
from lengthwise.session.console import emit_json, stderr, stdout

if TYPE_CHECKING:
    from lengthwise.core.timeline import Timeline
    from lengthwise.report.pages.simulation_page import ShownStep
    from lengthwise.sim.sim_options import SimOptions
    from lengthwise.sim.step_summary import SimulatedStep


def run(
    source: Annotated[Path | None, typer.Argument(help="plans.jsonl of `plan` or of a run, or a YAML config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, help="steps to plan; default: 10, or all that a file of plans holds"),
    ] = None,
    jitter: Annotated[
        float, typer.Option(metavar="SIGMA", help="lognormal noise on every micro-batch, such as 0.1")
    ] = 0.0,
    straggler: Annotated[
        list[str] | None, typer.Option(metavar="RANK:FACTOR", help="a rank that is slower; repeatable")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace (.json.gz) here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with timelines and memory here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Predict step time, idle share and throughput of a run's first steps, or of plans made before."""
    from lengthwise.report.chrome_trace import write_trace
    from lengthwise.report.whole_file import check_place, write_whole
    from lengthwise.sim.sim_options import SimOptions
    from lengthwise.sim.step_summary import summary

    check_place(trace, "--trace")
    check_place(html, "--html")
    options = SimOptions(jitter=jitter, stragglers=dict(map(parse_straggler, straggler or [])))
    plans = _plans(source, overrides, steps)
    found = [summary(plan, options) for plan in plans]
    document = figures(plans, found)
    if trace is not None:
        timelines = list(_traced(plans, options))
        write_trace(trace, [], predicted=timelines)
        if len(timelines) < len(plans):
            stderr().print(f"{trace} holds the first {len(timelines):,} of {len(plans):,} steps; viewers bear no more")
    if html is not None:
        write_whole({html: _page(plans, found, options, document).encode()})
    if as_json:
        emit_json(document)
    else:
        _print(document)


def parse_straggler(text: str) -> tuple[int, float]:
    """The rank and its factor in ``RANK:FACTOR``.

    Raises:
        InputError: the text has another form.
    """
    words, _, factor = text.partition(":")
    rank = whole_number(words)
    try:
        if rank is None:
            raise ValueError
        return rank, float(factor)
    except ValueError:
        raise InputError(
            f"--straggler {brief(text)[1:-1]} is not RANK:FACTOR, such as 3:1.5 for rank 3 half as fast again"
        ) from None


def figures(plans: Sequence[StepPlan], found: Sequence["SimulatedStep"]) -> dict[str, Any]:
    """Throughput and losses over the simulated steps; tokens are those trained, padding left out."""
    tokens = [plan.num_computed_tokens * (1 - plan.padding_fraction) for plan in plans]
    total_s = fsum(step.step_time_s for step in found)

    def share(name: str) -> float:
        return fsum(getattr(step.losses, name) * step.step_time_s for step in found) / total_s

    parts = ("compute", "communicate", "bubble", "imbalance", "switch", "update")
    return {
        "policy": plans[0].policy,
        "num_steps": len(plans),
        "num_devices": plans[0].num_devices,
        "tokens_per_s": sum(tokens) / total_s,
        "step_time_s": mean(step.step_time_s for step in found),
        "idle": share("idle"),
        **{name: share(name) for name in parts},
        "padding": 1 - sum(tokens) / sum(plan.num_computed_tokens for plan in plans),
        "gap_median": median(plan.gap for plan in plans),
        "peak_gib": max(step.peak_bytes for step in found) / GIB,
    }


def _plans(source: Path | None, overrides: list[str] | None, steps: int | None) -> list[StepPlan]:
    path, changes = split_arguments(source, overrides)
    if path is None or path.suffix != ".jsonl":
        return list(plan_steps(load(path, changes), steps or DEFAULT_STEPS))
    if changes:
        raise InputError(f"{changes[0]} does not apply to {path}, whose plans are made; plan again with it")
    plans = [_plan(row, path) for row in islice(read_jsonl(path), steps)]
    if not plans:
        raise InputError(f"no plans in {path}; make some with: lengthwise plan --out {path}")
    if len(plans) != steps and not path.read_bytes().endswith(b"\n"):
        stderr().print(f"{path} ends within a line, which is left out: {len(plans):,} plans are whole", soft_wrap=True)
    return plans


def _plan(row: dict[str, Any], path: Path) -> StepPlan:
    try:
        return StepPlan.from_json(row)
    except LengthwiseError as error:
        raise type(error)(f"{path}, step {brief(row.get('step'))}: {error}") from None


def _traced(plans: Sequence[StepPlan], options: "SimOptions") -> Iterator["Timeline"]:
    """Timelines of the first steps, at least one, as many as viewers bear."""
    from lengthwise.sim.engine import simulate

    num_spans = 0
    for plan in plans:
        timeline = simulate(plan, options)
        num_spans += len(timeline.spans)
        if num_spans > MOST_SPANS and plan is not plans[0]:
            return
        yield timeline


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from lengthwise.report.units import count, memory, seconds, share

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column()
    shown.add_column(justify="right", min_width=12)
    for words, value in (
        ("tokens/s", count(document["tokens_per_s"])),
        ("step time, mean", seconds(document["step_time_s"])),
        ("idle", share(document["idle"])),
        ("  bubbles within pipelines", share(document["bubble"])),
        ("  imbalance between pipelines", share(document["imbalance"])),
        ("padding", share(document["padding"])),
        ("gap to the bound, median", f"{document['gap_median']:.2%}"),
        ("peak memory per device", memory(document["peak_gib"] * GIB)),
    ):
        shown.add_row(words, value)
    console = stdout()
    num_steps, policy, num_devices = (document[name] for name in ("num_steps", "policy", "num_devices"))
    console.print(f"{num_steps:,} steps of policy {policy} on {num_devices:,} devices, simulated", soft_wrap=True)
    console.print(shown)


def _page(
    plans: Sequence[StepPlan], found: Sequence["SimulatedStep"], options: "SimOptions", document: dict[str, Any]
) -> str:
    """The page: figures over all steps, timeline and memory of a typical step and of the one that idles longest."""
    from lengthwise.report.pages.run_text import KeyFigure
    from lengthwise.report.pages.simulation_page import SimulationPage, render_simulation
    from lengthwise.report.units import count, memory, seconds, share

    return render_simulation(
        SimulationPage(
            title=f"Policy {document['policy']} on {document['num_devices']:,} devices",
            headline=" · ".join(_conditions(document["num_steps"], options)),
            tiles=(
                KeyFigure("tokens per second", count(document["tokens_per_s"]), "padding not counted"),
                KeyFigure("step time", seconds(document["step_time_s"]), "mean over steps"),
                KeyFigure("idle", share(document["idle"]), "of the device time"),
                KeyFigure("padding", share(document["padding"]), "of the computed tokens"),
                KeyFigure(
                    "gap to the bound", share(document["gap_median"]), "median over plans, above the proven bound"
                ),
                KeyFigure("peak memory", memory(document["peak_gib"] * GIB), "of the device that holds most"),
            ),
            shares=_parts(document),
            shown=tuple(_shown(plans, found, options)),
            columns=("step", "time", "planned", "bound", "idle", "bubble", "imbalance", "padding", "peak"),
            rows=tuple(_row(plan, step) for plan, step in zip(plans, found)),
        )
    )


def _shown(plans: Sequence[StepPlan], found: Sequence["SimulatedStep"], options: "SimOptions") -> Iterator["ShownStep"]:
    """The steps that are drawn, each with the reason."""
    from lengthwise.report.pages.simulation_page import ShownStep
    from lengthwise.report.units import share
    from lengthwise.sim.engine import simulate

    middle_s = median(step.step_time_s for step in found)
    typical = min(range(len(found)), key=lambda k: abs(found[k].step_time_s - middle_s))
    worst = max(range(len(found)), key=lambda k: found[k].idle * found[k].step_time_s)
    chosen = [(typical, "A typical step", "its time is the closest to the median")]
    if worst != typical:
        chosen.append((worst, "The worst step", "it idles longest"))
    for k, title, reason in chosen:
        lost = f"{share(found[k].bubble)} are bubbles and {share(found[k].losses.imbalance)} imbalance"
        caption = f"Step {plans[k].step:,}: {reason}. Of its device time, {lost}."
        yield ShownStep(title=title, caption=caption, timeline=simulate(plans[k], options))


def _parts(document: dict[str, Any]) -> tuple[tuple[str, str, float], ...]:
    """What device time goes to, in colours of the timelines."""
    return (
        ("compute", "k-compute", document["compute"]),
        ("communicate", "k-communicate", document["communicate"]),
        ("switch strategies", "s1", document["switch"]),
        ("bubbles within pipelines", "s5", document["bubble"]),
        ("imbalance between pipelines", "k-wait", document["imbalance"]),
        ("update weights", "k-update", document["update"]),
    )


def _conditions(num_steps: int, options: "SimOptions") -> list[str]:
    parts = ["1 step" if num_steps == 1 else f"{num_steps:,} steps"]
    if options.jitter:
        parts.append(f"jitter {options.jitter:g}")
    parts += [f"rank {rank} slower by {factor:g}x" for rank, factor in options.stragglers.items()]
    return parts


def _row(plan: StepPlan, step: "SimulatedStep") -> tuple[str, ...]:
    from lengthwise.report.units import memory, seconds, share

    return (
        f"{step.step:,}", seconds(step.step_time_s), seconds(plan.time_s), seconds(plan.lower_bound_s),
        share(step.idle), share(step.bubble), share(step.losses.imbalance), share(plan.padding_fraction),
        memory(step.peak_bytes),
    )  # fmt: skip
