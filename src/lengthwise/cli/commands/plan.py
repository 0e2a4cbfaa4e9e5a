"""`lengthwise plan`: the plans of the first steps of a run, without running it; needs no torch."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise.cli.launch import split_arguments
from lengthwise.cli.tables.plan_table import beyond_words, print_plans
from lengthwise.config.limits import MAX_STEPS
from lengthwise.config.run_config import load
from lengthwise.core.cost import CostModel, error_of
from lengthwise.session.console import emit_json, stdout
from lengthwise.session.plan_steps import DEFAULT_STEPS, beyond_profile, plan_steps, summarize_plans


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=MAX_STEPS, help="steps to plan; default: 10, with --out all of train.steps")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the plans here, one JSON object a line")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="a row for every step, however many")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Plan the first steps on cluster.name: step times, distance from the proven lower bound, and schemes used."""
    from lengthwise.report.whole_file import check_place, write_whole

    check_place(out, "--out")
    resolved = load(*split_arguments(config, overrides))
    costs: list[CostModel] = []
    plans = list(plan_steps(resolved, steps or (DEFAULT_STEPS if out is None else None), on_cost=costs.append))
    error = error_of(costs[0])
    if out is not None:
        write_whole({out: "".join(json.dumps(plan.to_json()) + "\n" for plan in plans).encode()})
    if as_json:
        document: dict[str, Any] = {"plans": [plan.to_json() for plan in plans], "summary": summarize_plans(plans)}
        document |= {"cost_error": error and asdict(error), "beyond_profile": beyond_profile(plans, costs[0])}
        emit_json({**document, "out": str(out) if out else None})
    else:
        print_plans(plans, summarize_plans(plans), verbose=verbose)
        accuracy = "too few measurements are public to say how far predictions are off"
        if error is not None:
            accuracy = str(error) if resolved.plan.profile else error.in_words("public measurements of the device")
        stdout().print(f"costs: {accuracy}", soft_wrap=True)
        if (beyond := beyond_profile(plans, costs[0])) is not None:
            stdout().print(beyond_words(beyond), soft_wrap=True)
