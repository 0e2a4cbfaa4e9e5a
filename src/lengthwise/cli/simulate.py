"""`lengthwise simulate`: execute plans in virtual time; needs no torch."""

from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

from lengthwise.cli.console import emit_json, stdout
from lengthwise.cli.launch import split_arguments
from lengthwise.cli.plan import StepsOption, plan_steps
from lengthwise.config import load
from lengthwise.core.errors import InputError
from lengthwise.core.plan import StepPlan
from lengthwise.core.run_folder import read_jsonl
from lengthwise.core.timeline import Timeline


def run(
    source: Annotated[Path | None, typer.Argument(help="plans.jsonl of `plan` or of a run, or a YAML config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    steps: StepsOption = 10,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace (.json.gz) here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Predict step time, idle share and throughput of a run's first steps, or of plans made before."""
    from lengthwise.report.trace import write_trace
    from lengthwise.sim.engine import simulate

    path, changes = split_arguments(source, overrides)
    if path is not None and path.suffix == ".jsonl":
        plans = [StepPlan.from_json(row) for row in read_jsonl(path)][:steps]
        if not plans:
            raise InputError(f"no plans in {path}; make some with: lengthwise plan --out {path}")
    else:
        plans = list(plan_steps(load(path, changes), steps))
    timelines = [simulate(plan) for plan in plans]
    if trace is not None:
        write_trace(trace, [], predicted=timelines)
    document = summary(plans, timelines)
    if as_json:
        emit_json(document)
        return
    _print(document)


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from lengthwise.report.units import count, seconds, share

    title = (
        f"{document['num_steps']} steps of policy {document['policy']} on {document['num_devices']} devices, simulated"
    )
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    shown.add_column()
    shown.add_column(justify="right", min_width=12)
    for words, value in (
        ("tokens/s", count(document["tokens_per_s"])),
        ("step time, mean", seconds(document["step_time_s"])),
        ("idle", share(document["idle"])),
        ("padding", share(document["padding"])),
        ("gap to the bound, median", f"{document['gap_median']:.2%}"),
        ("peak memory per device", f"{document['peak_gib']:.1f} GiB"),
    ):
        shown.add_row(words, value)
    stdout().print(shown)


def summary(plans: list[StepPlan], timelines: list[Timeline]) -> dict[str, Any]:
    """Throughput and losses over the simulated steps; tokens are those trained, padding left out."""
    tokens = [plan.num_computed_tokens * (1 - plan.padding_fraction) for plan in plans]
    total_s = sum(timeline.step_time_s for timeline in timelines)
    return {
        "policy": plans[0].policy,
        "num_steps": len(plans),
        "num_devices": plans[0].num_devices,
        "tokens_per_s": sum(tokens) / total_s,
        "step_time_s": mean(timeline.step_time_s for timeline in timelines),
        "idle": sum(timeline.idle_fraction * timeline.step_time_s for timeline in timelines) / total_s,
        "padding": 1 - sum(tokens) / sum(plan.num_computed_tokens for plan in plans),
        "gap_median": median(plan.gap for plan in plans),
        "peak_gib": max(sample.num_bytes for timeline in timelines for sample in timeline.memory) / 2**30,
    }
