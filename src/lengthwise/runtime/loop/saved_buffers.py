"""Buffers of a model in its checkpoints: small ones whole, of large ones the checksum, which must be that again."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.checksum import checksum

MOST_BYTES = 1 << 16
"""Of a buffer that is kept whole."""


def buffers_to_save(model: nn.Module) -> dict[str, Any]:
    """What the state of a checkpoint says of the buffers that ``state_dict`` has."""
    return {name: _saved(buffer) for name, buffer in _persistent(model)}


def restore_buffers(model: nn.Module, saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Set the buffers to what :func:`buffers_to_save` gave.

    Raises:
        InputError: a buffer is of another shape, or has other values and is too large to be in the checkpoint.
    """
    for name, buffer in _persistent(model):
        if name not in saved:
            continue
        found, here = saved[name], _saved(buffer)
        if (found["dtype"], found["shape"]) != (here["dtype"], here["shape"]):
            raise InputError(
                f"{checkpoint} has the buffer {name} as {found['dtype']} {found['shape']}, the model as "
                f"{here['dtype']} {here['shape']}; resume with the model that was saved"
            )
        if found["checksum"] == here["checksum"]:
            continue
        if "bytes" not in found:
            raise InputError(
                f"the buffer {name} has other values than when {checkpoint} was saved, which keeps buffers up to "
                f"{MOST_BYTES >> 10} KiB alone; set it to those values before run.resume()"
            )
        values = torch.frombuffer(bytearray(base64.b64decode(found["bytes"])), dtype=buffer.dtype)
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
