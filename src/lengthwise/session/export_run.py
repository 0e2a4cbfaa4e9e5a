"""Export a checkpoint of a run as a folder that Hugging Face transformers loads."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from lengthwise.core.atomic_write import check_free, new_folder, reason, shown
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import read_spec
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.hf_folder import save_pretrained
from lengthwise.runtime.models.registry import empty_model
from lengthwise.runtime.state.checkpoint import load_weights
from lengthwise.runtime.state.checkpoint_files import BEST, candidates, latest
from lengthwise.session.export_stock import write_stock_weights
from lengthwise.session.model_files import CONFIG, copy_files, small_files, source_files, special_ids, trained_config


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """The outcome of :func:`export_run`."""

    checkpoint: Path
    num_params: int


def export_run(run_folder: Path, out: Path, *, checkpoint: str | None = None) -> ExportedModel:
    """Write a checkpoint's master weights, with configuration and tokenizer, into the new folder ``out``.

    The files of a model that came from a folder (``model.hf``) are those of that folder, but for what training changed.

    Raises:
        InputError: there is no such checkpoint, a file of the run is damaged, or ``out`` cannot be used.
        LengthwiseError: ``out`` could not be written; nothing is left of it.
    """
    folder = RunFolder(run_folder)
    folder.check()
    check_free(out, setting="--out")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run_folder)):
        raise InputError(f"--out {shown(out)} is inside the run folder {shown(run_folder)}; name a folder elsewhere")
    document = folder.read_json("model.json")
    spec = None if "architecture" in document else folder.read_spec()
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
    return ExportedModel(checkpoint=source, num_params=document["num_params"] if spec is None else spec.num_params)


def _named(checkpoints: Path, name: str) -> Path:
    """The complete checkpoint of that name; ``best``: the one with the lowest validation loss."""
    if name == BEST and (checkpoints / BEST).is_file():
        name = (checkpoints / BEST).read_text(errors="replace").strip()
    complete = {path.name: path for path in candidates(checkpoints)}
    if name not in complete:
        names = ", ".join(complete) or "none"
        raise InputError(f"--checkpoint {name!r} is no complete checkpoint in {shown(checkpoints)}; there are: {names}")
    return complete[name]


def _write(folder: RunFolder, checkpoint: Path, spec: ModelSpec | None, out: Path) -> None:
    """``spec``: None of a model that transformers computes."""
    files, corpus = source_files(folder), folder.read_json("corpus.json")
    try:
        max_length, eos_id = corpus["max_length"], corpus["eos_id"]
    except KeyError as error:
        path = shown(folder.path / "corpus.json")
        raise InputError(f"{path} is damaged or missing ({type(error).__name__}: {error}); restore it") from None
    has_config = files is not None and (files / CONFIG).is_file()
    try:
        if spec is None:
            assert files is not None and has_config, "the folder of such a model has a configuration"
            architecture = folder.read_json("model.json")["architecture"]
            dtype = write_stock_weights(checkpoint, files, architecture, out)
        else:
            ids = {} if has_config else {"eos_token_id": eos_id, **special_ids(files)}
            model = _model_of(checkpoint, spec)
            dtype = next(model.parameters()).dtype
            save_pretrained(model, out, config={"max_position_embeddings": max_length, **ids})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    if files is None:
        return
    if has_config:
        if spec is not None:
            _check_is_of(files, spec)
        config = trained_config(files, dtype=str(dtype).removeprefix("torch."), max_length=max_length)
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    copy_files(small_files(files), out, leave_out=(CONFIG,))


def _check_is_of(files: Path, spec: ModelSpec) -> None:
    """Raise ``InputError`` if the configuration in ``files`` is of another model than the one that was trained."""
    if replace(read_spec(files), name=spec.name) != spec:
        raise InputError(
            f"{shown(files / CONFIG)} is of another model than the one that was trained (model.json); restore it"
        )


def _model_of(checkpoint: Path, spec: ModelSpec) -> Transformer:
    """The model with the master weights of a checkpoint."""
    weights = load_weights(checkpoint, spec)
    model = empty_model(spec, dtype=next(iter(weights.values())).dtype)
    model.load_state_dict(weights, assign=True)
    return model
