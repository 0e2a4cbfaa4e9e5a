"""Save a model's buffers in checkpoints: small ones whole, of large ones a checksum that must match on resume."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.checksum import checksum

MOST_BYTES = 1 << 16
"""The size up to which a buffer is saved whole."""


def buffers_to_save(model: nn.Module) -> dict[str, Any]:
    """Describe the persistent buffers of a model for a checkpoint: dtype, shape, checksum, and bytes of small ones."""
    return {name: _saved(buffer) for name, buffer in _persistent(model)}


def restore_buffers(model: nn.Module, saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Set the buffers of a model to the values that :func:`buffers_to_save` described.

    Raises:
        InputError: a buffer is of another shape, or has other values and is too large to be in the checkpoint.
    """
    for name, buffer in _persistent(model):
        if name not in saved:
            continue
        stored, current = saved[name], _saved(buffer)
        if (stored["dtype"], stored["shape"]) != (current["dtype"], current["shape"]):
            raise InputError(
                f"{checkpoint} has the buffer {name} as {stored['dtype']} {stored['shape']}, the model as "
                f"{current['dtype']} {current['shape']}; resume with the model that was saved"
            )
        if stored["checksum"] == current["checksum"]:
            continue
        if "bytes" not in stored:
            raise InputError(
                f"the buffer {name} has other values than when {checkpoint} was saved, which keeps buffers up to "
                f"{MOST_BYTES >> 10} KiB alone; set it to those values before run.resume()"
            )
        values = torch.frombuffer(bytearray(base64.b64decode(stored["bytes"])), dtype=buffer.dtype)
        with torch.no_grad():
            buffer.copy_(values.view(buffer.shape))


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    names = set(model.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in model.named_buffers() if name in names)


def _saved(buffer: Tensor) -> dict[str, Any]:
    described = {"dtype": str(buffer.dtype), "shape": list(buffer.shape), "checksum": checksum(buffer)}
    if not 0 < buffer.numel() * buffer.element_size() <= MOST_BYTES:
        return described
    flat = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return {**described, "bytes": base64.b64encode(flat.numpy().tobytes()).decode()}
