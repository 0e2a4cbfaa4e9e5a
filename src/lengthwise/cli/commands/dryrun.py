"""`lengthwise dryrun`: the real training step of any rank of a cluster of any size, without a GPU."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import check_torch, split_arguments
from lengthwise.cli.shared_options import MAX_DEVICES, Json
from lengthwise.config.choices import HeldWeights
from lengthwise.config.run_config import load
from lengthwise.session.console import emit_json


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=0, max=MAX_DEVICES, help="a rank to run; repeatable; default: first, middle and last"),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="plans.jsonl; its first plan is run instead of a new one")] = None,
    weights: Annotated[
        HeldWeights, typer.Option(help="what ranks hold of a model that transformers computes, as in prepare")
    ] = "auto",
    html: Annotated[Path | None, typer.Option(help="write a page with memory over time here")] = None,
    as_json: Json = False,
) -> None:
    """Run a step's kernels, collectives and allocations on fake tensors on device "cuda", beside what costs predict."""
    from lengthwise.cli.tables.dryrun_table import print_dry_run
    from lengthwise.report.pages.dryrun_page import render_dry_run
    from lengthwise.report.whole_file import check_place, write_whole
    from lengthwise.session.dry_run import dry_run

    check_torch()
    check_place(html, "--html")
    document = dry_run(load(*split_arguments(config, overrides)), ranks=rank or (), plan_file=plan, weights=weights)
    if html is not None:
        write_whole({html: render_dry_run(document).encode()})
    if as_json:
        emit_json(document)
    else:
        print_dry_run(document)
