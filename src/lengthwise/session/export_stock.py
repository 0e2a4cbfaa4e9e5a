"""Write the trained weights of a model that transformers computes, under the names that its files have."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.atomic_write import shown
from lengthwise.core.errors import InputError
from lengthwise.models.weight_files import INDEX, weight_files
from lengthwise.runtime.loop.saved_buffers import restore_buffers
from lengthwise.runtime.state.checkpoint import load_weights, read_state


def write_stock_weights(checkpoint: Path, files: Path, architecture: str, out: Path) -> torch.dtype:
    """Write the master weights of a checkpoint into ``out`` as safetensors alone; returns their dtype.

    ``files``: a folder with the model's ``config.json``.

    Raises:
        InputError: the configuration is of another model than the one that was trained.
    """
    weights = load_weights(checkpoint, None)
    model = _model_of(architecture, files, weights, checkpoint)
    model.save_pretrained(out)
    weight_names = {path.name for path in weight_files(out)} | {INDEX}
    for path in out.iterdir():
        if path.name not in weight_names:
            path.unlink()  # the model's own files are copied
    return next(iter(weights.values())).dtype


def _model_of(architecture: str, files: Path, weights: dict[str, Tensor], checkpoint: Path) -> Any:
    """The model with trained weights, made without weights of its own where they are all that it has."""
    import transformers

    kind = getattr(transformers, architecture)
    config = kind.config_class.from_pretrained(files)
    with torch.device("meta"):
        model = kind(config)
    expected = {name: list(value.shape) for name, value in model.named_parameters() if value.requires_grad}
    if expected != {name: list(weight.shape) for name, weight in weights.items()}:
        raise InputError(
            f"{shown(files / 'config.json')} is of another model than the one that was trained; restore it"
        )
    if any(value.is_meta for name, value in _lacking(model, weights)):
        model = kind(config)  # with buffers and fixed tables, which follow from the configuration
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    restore_buffers(model, read_state(checkpoint).get("engine", {}).get("buffers", {}), checkpoint)
    return model


def _lacking(model: nn.Module, weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """What is saved with the model and was not trained: persistent buffers and fixed parameters."""
    saved = model.state_dict(keep_vars=True)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # tied ones once
    return [(name, value) for name, value in tensors.items() if name in saved and name not in weights]
