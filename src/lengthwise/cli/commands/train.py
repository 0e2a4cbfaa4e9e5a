"""`lengthwise train`: torchrun on one machine; under torchrun, one rank."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import speaks_for_all, split_arguments


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    nproc: Annotated[int, typer.Option(min=1, max=1024, help="ranks on this machine")] = 1,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "--methods", help="how ranks share a layer, or random; plan.method; A,B: plan.methods"
        ),
    ] = None,
    degree: Annotated[int | None, typer.Option(min=1, help="ranks that share a layer; plan.degree")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="plans to execute, made by `lengthwise plan --out` or by hand; plan.file")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="a run folder: go on from its latest checkpoint")] = None,
    fall_back: Annotated[
        bool, typer.Option("--fall-back", help="where the latest checkpoint is damaged, go on from the one before")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="times that all ranks are started again after one has died")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="only warnings, errors and the last line")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Train. For several machines use torchrun itself: torchrun ARGS -m lengthwise train CONFIG [OVERRIDES]."""
    from lengthwise.cli.train_config import train
    from lengthwise.core.run_folder import RunFolder
    from lengthwise.session.console import emit_json

    path, changes = split_arguments(config, overrides)
    options = {"degree": degree, "file": plan, "methods" if method and "," in method else "method": method}
    changes += [f"plan.{name}={value}" for name, value in options.items() if value is not None]
    folder = train(
        path, changes, nproc=nproc, resume=resume, fall_back=fall_back, max_restarts=max_restarts, quiet=quiet
    )
    if as_json and speaks_for_all():
        emit_json({"run_folder": str(folder), "status": RunFolder(folder).read_json("status.json")})
