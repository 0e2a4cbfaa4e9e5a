"""Checkpoints: a folder per step that is either complete or not there.

checkpoints/step_00000100/   written as step_00000100.partial, renamed when every rank has finished
    *.distcp, .metadata      torch.distributed.checkpoint: master weights and moments as flat sharded tensors
    state.json               step, sampler, digests, where each parameter lies in the flat buffer
checkpoints/latest           the name of the newest complete one
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard

from lengthwise.core.errors import InputError
from lengthwise.runtime.state.sharded import ShardedState

CHECKPOINT_SCHEMA_VERSION = 1


def save(folder: Path, sharded: ShardedState, extra: dict[str, Any], *, keep: int) -> Path:
    """Write a checkpoint after ``extra["step"]`` steps; every rank calls this. Keeps the ``keep`` newest."""
    name = f"step_{extra['step']:08d}"
    partial, final = folder / f"{name}.partial", folder / name
    first = sharded.world.is_first
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_as_sharded(sharded, sharded.owned()), checkpoint_id=str(partial), no_dist=False)
    if first:
        document = {
            "schema_version": CHECKPOINT_SCHEMA_VERSION,
            "num_elements": sharded.num_elements,
            "master_dtype": str(sharded.master_dtype).removeprefix("torch."),
            "slices": sharded.slices,
            **extra,
        }
        (partial / "state.json").write_text(json.dumps(document) + "\n")
        if final.exists():  # the same step again, after a resume from an older checkpoint
            final.rename(folder / f"{name}.replaced")
        partial.rename(final)
        shutil.rmtree(folder / f"{name}.replaced", ignore_errors=True)
        pointer = folder / "latest.partial"
        pointer.write_text(name + "\n")
        pointer.replace(folder / "latest")
        for old in sorted(path for path in folder.glob("step_????????") if path != final)[: -keep + 1 or None]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in ``folder``.

    Raises:
        InputError: there is none.
    """
    pointer = folder / "latest"
    if not pointer.is_file():
        raise InputError(
            f"no complete checkpoint in {folder}: the run stopped before its first one; remove it and start anew"
        )
    return folder / pointer.read_text().strip()


def read_extra(checkpoint: Path) -> dict[str, Any]:
    """What was saved beside the tensors.

    Raises:
        InputError: not a checkpoint, or of another schema version.
    """
    try:
        document = json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{checkpoint} is not a complete checkpoint ({error}); name another one") from None
    if document.get("schema_version") != CHECKPOINT_SCHEMA_VERSION:
        raise InputError(
            f"{checkpoint} has checkpoint schema {document.get('schema_version')}, this version reads "
            f"{CHECKPOINT_SCHEMA_VERSION}"
        )
    return document


def load(checkpoint: Path, sharded: ShardedState) -> dict[str, Any]:
    """Restore weights and moments on every rank and return what was saved beside them.

    Raises:
        InputError: the checkpoint is incomplete, damaged or of a model of another shape.
    """
    extra = read_extra(checkpoint)
    slices = {name: tuple(interval) for name, interval in extra["slices"].items()}
    if slices != sharded.slices:
        wrong = sorted(set(slices.items()) ^ set(sharded.slices.items()))
        raise InputError(f"{checkpoint} holds another model: parameter {wrong[0][0]!r} differs in size or place")
    owned = sharded.owned()
    tensors = _as_sharded(sharded, owned)
    try:
        dcp.load(tensors, checkpoint_id=str(checkpoint))
    except (Exception, CheckpointException) as error:  # many kinds for damaged files; the latter is no Exception
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        raise InputError(f"{checkpoint} cannot be read ({reason}); a file is damaged or missing") from error
    sharded.restore({name: tensor.to_local() for name, tensor in tensors.items()}, extra["step"])
    return extra


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Master weights by their flat buffer slice, in one process without a process group; [elements] each."""
    extra = read_extra(checkpoint)
    flat = {"master": torch.empty(extra["num_elements"], dtype=getattr(torch, extra["master_dtype"]))}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        dcp.load(flat, checkpoint_id=str(checkpoint), no_dist=True)
    return {name: flat["master"][start:end] for name, (start, end) in extra["slices"].items()}


def _as_sharded(sharded: ShardedState, owned: dict[str, Tensor]) -> dict[str, DTensor]:
    """Each rank's elements as one tensor over all ranks; ``core.layout.fully_sharded`` is DTensor's own rule."""
    return {
        name: DTensor.from_local(
            tensor.to(sharded.world.device), sharded.world.mesh, [Shard(0)], run_check=False,
            shape=torch.Size([sharded.num_elements]), stride=(1,),
        )
        for name, tensor in owned.items()
    }  # fmt: skip
