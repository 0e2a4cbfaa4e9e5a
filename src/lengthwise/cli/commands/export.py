"""`lengthwise export`: a checkpoint as a folder that Hugging Face transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import check_torch
from lengthwise.session.console import emit_json, stderr


def run(
    run_folder: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    checkpoint: Annotated[str | None, typer.Option(help="such as step_00000100, or best; default: the latest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Write safetensors with the checkpoint's master weights, and the model's configuration and tokenizer."""
    check_torch()
    from lengthwise.session.export_run import export_run

    exported = export_run(run_folder, out, checkpoint=checkpoint)
    if as_json:
        emit_json({"out": str(out), "checkpoint": str(exported.checkpoint), "num_params": exported.num_params})
    else:
        stderr().print(f"wrote {out} from {exported.checkpoint}")
