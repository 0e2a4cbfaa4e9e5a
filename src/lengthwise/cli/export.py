"""`lengthwise export`: a checkpoint as a folder that Hugging Face transformers loads."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.console import emit_json, stderr
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder


def run(
    run_folder: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    checkpoint: Annotated[str | None, typer.Option(help="such as step_00000100; default: the latest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Write config.json and safetensors with the checkpoint's master weights, and the index's tokenizer.json if any."""
    from lengthwise.runtime.model.build import build_model
    from lengthwise.runtime.model.hf import save_pretrained
    from lengthwise.runtime.state.checkpoint import latest, load_weights

    folder = RunFolder(run_folder)
    folder.check()
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; name a new folder")
    spec = folder.read_spec()
    source = folder.checkpoints / checkpoint if checkpoint else latest(folder.checkpoints)
    weights = load_weights(source, spec)
    model = build_model(spec, dtype=next(iter(weights.values())).dtype)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    corpus = folder.read_json("corpus.json")
    extra = {"max_position_embeddings": corpus["max_length"], "eos_token_id": corpus["eos_id"]}
    save_pretrained(model, out, config=extra)
    tokenizer = Path(next(iter(corpus["indexes"].values()))) / "tokenizer.json"
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    if as_json:
        emit_json({"out": str(out), "checkpoint": str(source), "num_params": spec.num_params})
    else:
        stderr().print(f"wrote {out} from {source}")
