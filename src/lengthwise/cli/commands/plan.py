"""`lengthwise plan`: the plans of the first steps of a run, without running it; needs no torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import split_arguments
from lengthwise.config.run_config import MAX_STEPS, Config, load
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import open_corpus
from lengthwise.session.console import emit_json, progress, stderr, stdout
from lengthwise.session.planning import (
    make_cost,
    make_planner,
    make_sampler,
    resolve_cluster,
    resolve_model,
    with_draws,
)

DEFAULT_STEPS = 10


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=MAX_STEPS, help="steps to plan; default: 10, with --out all of train.steps")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the plans here, one JSON object a line")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Plan the first steps on cluster.name and say how far each plan is from the proven lower bound."""
    from lengthwise.report.whole_file import check_place, write_whole

    check_place(out, "--out")
    resolved = load(*split_arguments(config, overrides))
    plans = list(plan_steps(resolved, steps or (DEFAULT_STEPS if out is None else resolved.train.steps)))
    if out is not None:
        write_whole({out: "".join(json.dumps(plan.to_json()) + "\n" for plan in plans).encode()})
    if as_json:
        emit_json({"plans": [plan.to_json() for plan in plans], "out": str(out) if out else None})
    else:
        _print(plans)


def plan_steps(config: Config, steps: int) -> Iterator[StepPlan]:
    """Plans of the run's first ``steps`` steps.

    Raises:
        InfeasibleError: before the first plan, if some sequence of the corpus fits nowhere.
    """
    corpus = open_corpus(config.data)
    spec, cluster = resolve_model(config, corpus), resolve_cluster(config)
    cost = make_cost(config, spec, cluster)
    planner = with_draws(config, make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus))
    if cluster.num_devices > 1 and max(config.plan.degree or 1, config.plan.max_degree, config.plan.max_stages) == 1:
        stages = min(8, cluster.num_devices)
        stderr().print(
            "every pipeline is one device, as plan.max_degree and plan.max_stages are 1; for any degree and up to "
            f"{stages} stages set plan.max_degree={cluster.num_devices} plan.max_stages={stages}"
            + (" and plan.profile= (empty), for a profile is of one device" if config.plan.profile else ""),
            soft_wrap=True,
        )
    sampler = make_sampler(config, corpus)
    with progress() as bar:
        for _ in bar.track(range(steps), description="plan"):
            yield planner(next(sampler))


def _print(plans: list[StepPlan]) -> None:
    from rich.table import Table

    from lengthwise.report.units import seconds, share

    shown = Table(title=f"policy {plans[0].policy} on {plans[0].num_devices} devices", box=None, pad_edge=False)
    for heading in ("step", "seqs", "tokens", "longest", "packs", "padding", "predicted", "bound", "gap"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for plan in plans:
        packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
        lengths = [length for pack in packs for length in pack.lengths]
        shown.add_row(
            str(plan.step), f"{len(lengths):,}", f"{sum(lengths):,}", f"{max(lengths):,}", f"{len(packs):,}",
            share(plan.padding_fraction), seconds(plan.time_s), seconds(plan.lower_bound_s), f"{plan.gap:.2%}",
        )  # fmt: skip
    stdout().print(shown)
