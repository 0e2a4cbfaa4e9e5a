"""Checkpoints: saved by any number of ranks, read by any other, or by one process without ranks.

torch.distributed.checkpoint holds the tensors (*.distcp, .metadata); ``state.json`` says what they are: step, sampler,
model, optimizer, and a digest of every file. :mod:`lengthwise.runtime.state.checkpoint_files` says which are complete.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lengthwise.core.errors import InputError, Setting
from lengthwise.core.specs import ModelSpec
from lengthwise.core.version import __version__
from lengthwise.runtime.state.checkpoint_files import (
    CHECKPOINT_SCHEMA_VERSION,
    STATE_FILE,
    candidates,
    check_optimizer,
    check_precision,
    damage,
    damaged,
    latest,
    led_to,
    outlook,
    point_to_best,
    read_state,
    step_back,
    steps_up_to,
)
from lengthwise.runtime.state.contents import MASTER, ShardContent, restore, room_for
from lengthwise.runtime.state.damaged_checkpoint import DamagedCheckpoint
from lengthwise.runtime.state.metadata_reader import METADATA_FILE, ForeignMetadataError, Reader
from lengthwise.runtime.state.parameter_groups import restore_values
from lengthwise.runtime.state.saver import CheckpointSaver, HostGroup
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.table import ParameterTable

__all__ = [
    "CHECKPOINT_SCHEMA_VERSION", "candidates", "latest", "led_to", "load", "load_tensors", "load_weights", "outlook",
    "point_to_best", "read_state", "save", "step_back", "verify",
]  # fmt: skip

_log = logging.getLogger(__name__)
_MASTER_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64)}


def save(
    folder: Path,
    state: ShardedState,
    extra: dict[str, Any],
    *,
    keep: int,
    beside: Mapping[str, ShardContent] = MappingProxyType({}),
) -> None:
    """Write a checkpoint after ``extra["step"]`` steps; every rank calls this. The ``keep`` newest stay in ``folder``.

    ``beside``: this rank's part of what the checkpoint has beside the state, by name.

    A run writes its checkpoints with a :class:`CheckpointSaver`, which does not make it wait.
    """
    saver = CheckpointSaver(folder, state, keep=keep, makes_parents=True)
    try:
        saver.save(extra, wait=True, beside=beside)
    finally:
        saver.close()


def load(checkpoint: Path, state: ShardedState) -> dict[str, Any]:
    """Restore weights and optimizer on every rank and return what was saved beside them.

    Raises:
        InputError: the checkpoint is incomplete or damaged, of another model or another optimizer, or has more
            precise weights.
    """
    group = HostGroup(state.world.timeout)
    try:
        document = _checked_by_all(checkpoint, state, group)
        with _readable(checkpoint):
            reader = Reader(checkpoint, document["files"])
            saved = reader.metadata.state_dict_metadata
            kinds = {name: (tensor.size, tensor.properties.dtype) for name, tensor in saved.items()}  # type: ignore[union-attr]
            described = document["optimizer"].get("state")  # older checkpoints have none, as those of torch's have
            room = room_for(state, kinds, described)
            tensors = {name: content.on(group.mesh) for name, content in room.items()}
            dcp.load(tensors, storage_reader=reader, process_group=group.handle)
    finally:
        group.close()
    if state.world.is_first:
        _warn_of_differences(checkpoint, document, state)
    scaled = document.get("loss_scale")  # older checkpoints have none
    if state.loss_scaler is not None and scaled is not None:
        state.loss_scaler.load_state_dict(scaled)
    num_left_out = len(document.get("skipped", ())) + (scaled["num_skipped"] if scaled else 0)
    state.unused.load_state_dict(document.get("unused_parameters", {}))  # nor do they have these
    restore(state, room, document["step"] - num_left_out, described)
    state.saved_steps[checkpoint.parent.resolve()] = steps_up_to(checkpoint, document)
    restore_values(state.optimizer, document["optimizer"].get("groups", {}))  # older checkpoints have none
    return document


def load_weights(checkpoint: Path, spec: ModelSpec | None) -> dict[str, Tensor]:
    """The whole master weights by parameter, in one process without a process group; ``spec``: None takes any model's.

    Raises:
        InputError: as :func:`load`.
    """
    document = verify(checkpoint)
    if spec is not None:
        _check_digest(checkpoint, document, spec.digest, spec.name)
    with _readable(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        bounds = document["unit_bounds"]
        buffer = torch.empty(bounds[-1], dtype=_MASTER_DTYPES[document["master_dtype"]])
        weights = {}
        for name, slot in document["parameters"].items():
            shape = torch.Size(slot["shape"])
            weights[name] = buffer[slot["start"] : slot["start"] + shape.numel()].view(shape)
        units = {str(unit): buffer[start:end] for unit, (start, end) in enumerate(pairwise(bounds))}
        parts = weights if document["has_whole_parameters"] else units
        tensors = {f"{MASTER}/{name}": part for name, part in parts.items()}
        dcp.load(tensors, storage_reader=Reader(checkpoint, document["files"]), no_dist=True)
    return weights


def load_tensors(checkpoint: Path, files: Mapping[str, Any], room: dict[str, Tensor]) -> None:
    """Read tensors of a checkpoint that was verified into ``room``, by name, in this process alone.

    ``files``: what its state says of its files.
    """
    with _readable(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        dcp.load(room, storage_reader=Reader(checkpoint, files), no_dist=True)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Compare every file with its digest, and return what was saved beside the tensors.

    Raises:
        InputError: a file is missing or is not as it was written.
    """
    document = read_state(checkpoint)
    _verify_files(checkpoint, document["files"])
    return document


def _verify_files(checkpoint: Path, expected: dict[str, Any]) -> None:
    for name, digest in expected.items():
        if Path(name).name != name:
            raise damaged(checkpoint / STATE_FILE, f"lists {name!r}, which is no file of a checkpoint")
        if wrong := damage(checkpoint / name, digest):
            raise damaged(checkpoint / name, wrong)


def _checked_by_all(checkpoint: Path, state: ShardedState, group: HostGroup) -> dict[str, Any]:
    """Verify a checkpoint on all ranks and return what was saved beside the tensors; all raise the first rank's error.

    Each file is verified by one rank, so that together they read every byte once, whoever will need it.
    """
    world, document = state.world, dict[str, Any]()
    error: tuple[str, str] | None = None
    try:
        document = read_state(checkpoint)
        _check_model(checkpoint, document, state.table)
        _check_optimizer(checkpoint, document, state)
        check_precision(checkpoint, document["master_dtype"], str(state.master_dtype).removeprefix("torch."))
        _verify_files(checkpoint, dict(list(document["files"].items())[world.rank :: world.size]))
    except InputError as message:
        error = message.marked, message.problem if isinstance(message, DamagedCheckpoint) else ""
    errors = [refusal for refusal in group.gather(error) if refusal]
    if errors:
        text, problem = errors[0]
        raise DamagedCheckpoint(text, problem=problem) if problem else InputError(text)
    return document


def _check_model(checkpoint: Path, document: dict[str, Any], table: ParameterTable) -> None:
    saved = document["parameters"]
    here = {name: {"start": slot.start, "shape": list(slot.shape)} for name, slot in table.slots.items()}
    for name in {**here, **saved}:
        theirs, ours = saved.get(name), here.get(name)
        if theirs is None or ours is None or theirs["shape"] != ours["shape"]:
            shapes = [f"of shape {slot['shape']}" if slot else "missing" for slot in (theirs, ours)]
            raise InputError(
                f"{checkpoint / STATE_FILE} holds another model: parameter {name!r} is {shapes[0]} there, {shapes[1]} "
                f"here; resume with the {Setting.MODEL} of the run that saved it, or start a new run"
            )
    _check_digest(checkpoint, document, table.digest, table.spec.name if table.spec else "this model")
    assert saved == here and document["unit_bounds"] == list(table.bounds), "one schema version has one order of units"


def _check_digest(checkpoint: Path, document: dict[str, Any], digest: str, name: str) -> None:
    if document["model_digest"] != digest:
        raise InputError(
            f"{checkpoint / STATE_FILE} holds another model: its digest is {document['model_digest']}, that of "
            f"{name} is {digest}. It may have as many weights, but heads, positions or norms differ; resume "
            f"with the {Setting.MODEL} of the run that saved it, or start a new run"
        )


def _check_optimizer(checkpoint: Path, document: dict[str, Any], state: ShardedState) -> None:
    saved, settings = document["optimizer"], state.settings
    check_optimizer(checkpoint, saved, settings.name)
    if saved["tensors"] != list(settings.state_names):
        constants = Setting.MOMENTUM if settings.make is None else f"the constants of {Setting.OPTIMIZER}"
        raise InputError(
            f"{checkpoint / STATE_FILE} holds {saved['tensors'] or 'no tensors'} of {settings.name}, which keeps "
            f"{list(settings.state_names) or 'none'} in this run; set {constants} as when it was saved"
        )


def _warn_of_differences(checkpoint: Path, document: dict[str, Any], state: ShardedState) -> None:
    """Warn of what is no reason to refuse a checkpoint, but may make a resumed run differ."""
    here = {
        "lengthwise_version": __version__,
        "torch_version": torch.__version__,
        "master_dtype": str(state.master_dtype).removeprefix("torch."),
    }
    for name, ours in here.items():
        if document[name] != ours:
            _log.warning("%s was written with %s %s, this run has %s", checkpoint, name, document[name], ours)
    if state.settings.group_values and "groups" not in document["optimizer"]:
        _log.warning(
            "%s was written by an older version, without %s of the parameter groups of %s, which begin anew",
            checkpoint, ", ".join(state.settings.group_values), state.settings.name,
        )  # fmt: skip


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Raise ``InputError`` for a checkpoint that torch cannot read though its files are intact, or must not read."""
    try:
        yield
    except ForeignMetadataError as error:
        raise InputError(
            f"{checkpoint / METADATA_FILE} was not written by lengthwise: {error}; nothing of it was run. Do not use "
            "this checkpoint: ask whoever made it for an export (safetensors), or go on from another one"
        ) from None
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        raise InputError(
            f"{checkpoint} cannot be read by torch {torch.__version__} ({reason}), though its files are as they were "
            f"written; use the torch_version that {checkpoint / STATE_FILE} names"
        ) from error
