"""What checkpoints of a prepared model keep beside what is trained: its buffers and frozen weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lengthwise.runtime.loop.frozen_weights import FROZEN
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.saved_buffers import buffers_to_save, restore_buffers
from lengthwise.runtime.state.contents import ShardContent


def beside_to_save(prepared: PreparedModel) -> tuple[dict[str, Any], dict[str, ShardContent]]:
    """Entries of a checkpoint's state, and tensors that it has besides; every rank calls this.

    Raises:
        InputError: frozen weights differ between ranks.
    """
    buffers = buffers_to_save(prepared.model)
    entry, tensors = ({}, {}) if prepared.frozen_weights is None else prepared.frozen_weights.to_save(prepared.gather)
    entries = {"buffers": buffers, FROZEN: entry}
    return {name: value for name, value in entries.items() if value}, tensors


def restore_beside(
    prepared: PreparedModel, saved: Mapping[str, Any], checkpoint: Path, *, files: Mapping[str, Any]
) -> None:
    """Set buffers and frozen weights to what :func:`beside_to_save` gave; every rank calls this.

    ``files``: the digests of the checkpoint's files.

    Raises:
        InputError: they are of another model.
    """
    restore_buffers(prepared.model, saved.get("buffers", {}), checkpoint)
    if prepared.frozen_weights is not None:
        prepared.frozen_weights.restore(saved.get(FROZEN, {}), checkpoint, files, prepared.gather)
