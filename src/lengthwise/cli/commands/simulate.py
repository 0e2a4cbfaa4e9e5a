"""`lengthwise simulate`: execute plans in virtual time; needs no torch."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import split_arguments
from lengthwise.config.limits import MAX_STEPS
from lengthwise.config.run_config import load
from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.session.console import emit_json, stderr
from lengthwise.session.plan_steps import DEFAULT_STEPS, plan_steps


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
    from lengthwise.cli.tables.simulate_table import print_simulation
    from lengthwise.report.chrome_trace import write_trace
    from lengthwise.report.whole_file import check_place, write_whole
    from lengthwise.session.simulate_plans import figures, first_timelines, parse_straggler
    from lengthwise.session.simulation_report import simulation_html
    from lengthwise.sim.sim_options import SimOptions
    from lengthwise.sim.step_summary import summary

    check_place(trace, "--trace")
    check_place(html, "--html")
    options = SimOptions(jitter=jitter, stragglers=dict(map(parse_straggler, straggler or [])))
    plans = _plans(source, overrides, steps)
    simulated = [summary(plan, options) for plan in plans]
    document = figures(plans, simulated)
    if trace is not None:
        timelines = list(first_timelines(plans, options))
        write_trace(trace, [], predicted=timelines)
        if len(timelines) < len(plans):
            stderr().print(f"{trace} holds the first {len(timelines):,} of {len(plans):,} steps; viewers bear no more")
    if html is not None:
        write_whole({html: simulation_html(plans, simulated, options, document).encode()})
    if as_json:
        emit_json(document)
    else:
        print_simulation(document)


def _plans(source: Path | None, overrides: list[str] | None, steps: int | None) -> list[StepPlan]:
    """Read the plans of a file, or plan the steps of a configuration."""
    from lengthwise.session.simulate_plans import ends_within_line, read_plans

    path, changes = split_arguments(source, overrides)
    if path is None or path.suffix != ".jsonl":
        return list(plan_steps(load(path, changes), steps or DEFAULT_STEPS))
    if changes:
        raise InputError(f"{changes[0]} does not apply to {path}, whose plans are made; plan again with it")
    plans = read_plans(path, steps=steps)
    if len(plans) != steps and ends_within_line(path):
        stderr().print(f"{path} ends within a line, which is left out: {len(plans):,} plans are whole", soft_wrap=True)
    return plans
