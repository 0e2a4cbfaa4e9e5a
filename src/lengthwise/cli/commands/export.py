"""`lengthwise export`: a checkpoint as a folder that Hugging Face transformers loads."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.core.atomic_write import check_free, new_folder, reason, shown
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.state.checkpoint_files import candidates, latest
from lengthwise.session.console import emit_json, stderr


def run(
    run_folder: Annotated[Path, typer.Argument(help="folder of a run")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    checkpoint: Annotated[str | None, typer.Option(help="such as step_00000100; default: the latest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Write config.json and safetensors with the checkpoint's master weights, and the index's tokenizer.json if any."""
    folder = RunFolder(run_folder)
    folder.check()
    check_free(out, setting="--out")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run_folder)):
        raise InputError(f"--out {shown(out)} is inside the run folder {shown(run_folder)}; name a folder elsewhere")
    spec = folder.read_spec()
    source = _named(folder.checkpoints, checkpoint) if checkpoint else latest(folder.checkpoints)
    try:
        with new_folder(out, setting="--out") as partial:
            _write(folder, source, spec, partial / "model")
            for file in (partial / "model").iterdir():
                file.replace(partial / file.name)
            (partial / "model").rmdir()
    except OSError as error:
        raise LengthwiseError(
            f"--out {shown(out)} could not be written ({reason(error)}); nothing is left of it"
        ) from None
    if as_json:
        emit_json({"out": str(out), "checkpoint": str(source), "num_params": spec.num_params})
    else:
        stderr().print(f"wrote {out} from {source}")


def _named(checkpoints: Path, name: str) -> Path:
    """The complete checkpoint of that name."""
    complete = {path.name: path for path in candidates(checkpoints)}
    if name not in complete:
        names = ", ".join(complete) or "none"
        raise InputError(f"--checkpoint {name!r} is no complete checkpoint in {shown(checkpoints)}; there are: {names}")
    return complete[name]


def _write(folder: RunFolder, source: Path, spec: ModelSpec, out: Path) -> None:
    """What transformers loads: the weights with their sizes, and the tokenizer of the first index if it has one."""
    from safetensors import SafetensorError

    from lengthwise.runtime.models.hf_folder import save_pretrained
    from lengthwise.runtime.models.registry import build_model
    from lengthwise.runtime.state.checkpoint import load_weights

    corpus = folder.read_json("corpus.json")
    try:
        extra = {"max_position_embeddings": corpus["max_length"], "eos_token_id": corpus["eos_id"]}
        tokenizer = Path(next(iter(corpus["indexes"].values()))) / "tokenizer.json"
    except (KeyError, AttributeError, StopIteration, TypeError) as error:
        path = shown(folder.path / "corpus.json")
        raise InputError(f"{path} is damaged or missing ({type(error).__name__}: {error}); restore it") from None
    weights = load_weights(source, spec)
    model = build_model(spec, dtype=next(iter(weights.values())).dtype)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    try:
        save_pretrained(model, out, config=extra)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, out / "tokenizer.json")
