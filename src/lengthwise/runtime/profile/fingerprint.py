"""Identify what a profile was measured on, and reuse a saved profile while that is unchanged."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lengthwise.core.atomic_write import reason
from lengthwise.core.errors import InputError
from lengthwise.core.head_split import shared_by
from lengthwise.core.layer_profile import Identity, LayerTable
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.objects import broadcast_json
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.layer_kinds import kinds_of
from lengthwise.runtime.profile.measure import device_name
from lengthwise.runtime.wrap.oom_recovery import autocast_dtype

_log = logging.getLogger("lengthwise")
NEARLY = 0.9
"""The part of the longest length that a saved profile has to reach: so far beyond it a fit holds."""
_PACKAGES = ("torch", "transformers", "lengthwise")


def identity_of(run: PreparedModel) -> Identity:
    """Identify the model, device and software of a run."""
    model, device = run.model, run.world.device
    autocast, kinds = autocast_dtype(device), set(kinds_of(run.wrapped_model.structure.layers))
    digest = _digest(run) if len(kinds) == 1 else f"{_digest(run)}, {len(kinds)} kinds of layers"
    if (compiled := run.wrapped_model.compiled) is not None:
        digest += f", compiled by {compiled.backend}"
    if run.state.settings.narrow_gradients:
        digest += ", gradients in the dtype of weights"
    if run.state.coarsest_dtype != run.state.compute_dtype:
        digest += ", trained parameters of several dtypes"
    dtype = str(run.state.compute_dtype).removeprefix("torch.")
    return Identity(
        model_name=type(model).__name__,
        model_digest=digest if autocast is None else f"{digest}, autocast to {autocast}",
        device=device_name(device),
        dtype=dtype,
        num_ranks=run.world.size,
        software=", ".join(f"{package} {_version(package)}" for package in _PACKAGES),
    )


def other_bytes(run: PreparedModel) -> int:
    """Bytes of the parameters that are not trained, and of buffers."""
    model, structure = run.model, run.wrapped_model.structure
    counted = {*structure.parameters, *(name for table in structure.frozen_tables() for name in table.slots)}
    others = [*(tensor for name, tensor in model.named_parameters() if name not in counted), *model.buffers()]
    storages = [tensor.untyped_storage() for tensor in others]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(structure.unit_frozen_bytes()) + sum(sizes.values())


def find_table(
    run: PreparedModel,
    path: Path,
    make: Callable[[], LayerTable],
    *,
    longest: int,
    degrees: Sequence[int],
    methods: Sequence[Method] = (Method.ULYSSES,),
) -> tuple[LayerTable, bool]:
    """Load the profile at ``path`` if it is of this run and goes far enough; else ``make()`` one and save it there.

    Returns the table, and whether it was loaded. The first rank reads and writes; all get the same. What differs is
    logged.

    Raises:
        InputError: there is a file at ``path`` and it is no profile: it is not written over.
    """
    identity = identity_of(run)
    shared = [(degree, str(method)) for degree in degrees for method in shared_by(degree, methods)]
    saved = _read(path, identity, longest, shared) if run.world.is_first else None
    if isinstance(saved, LayerTable) and saved.host is None and run.world.device.type == "cuda":
        _log.warning("the profile at %s knows no link to the host: measured anew", path)
        saved = None
    document = broadcast_json(run.world, saved.document if isinstance(saved, LayerTable) else saved)
    if isinstance(document, str):
        raise InputError(document)
    if document is not None:
        return LayerTable.of_document(document), True
    table = replace(make(), identity=identity)  # as it was looked for: forwards may write to a model's config
    if run.world.is_first:
        keep_table(table, path)
    return table, False


def keep_table(table: LayerTable, path: Path) -> None:
    """Write a profile for later runs; where it cannot be written, say so and go on."""
    try:
        table.save(path)
    except OSError as error:
        _log.warning(
            "what was measured cannot be kept in %s (%s), and is measured again in the next run; give profile= a file "
            "that can be written",
            path, reason(error),
        )  # fmt: skip


def _read(path: Path, identity: Identity, longest: int, shared: Sequence[tuple[int, str]]) -> LayerTable | str | None:
    """Return the saved table, an error message, or None if a table has to be measured."""
    try:
        if not path.exists():
            return None
        table = LayerTable.load(path)
    except OSError:
        return None  # nobody may look there
    except InputError as error:
        return str(error)
    differences = identity.differences(table.identity)
    if table.longest < NEARLY * longest:
        differences.append(f"sequences of up to {table.longest:,} tokens instead of {longest:,}")
    if missing := sorted({degree for degree, _ in shared} - set(table.degrees)):
        differences.append(f"no degree {', '.join(map(str, missing))}")
    elif more := sorted({method for _, method in set(shared) - set(table.shared)}):
        differences.append(f"no times of {', '.join(more)}")
    if differences:
        _log.warning("the profile at %s has %s: measured anew", path, "; ".join(differences))
        return None
    return table


def _digest(run: PreparedModel) -> str:
    """Digest a model's modules and constants, parameter shapes, and transformers configuration."""
    wrapped_model, model = run.wrapped_model, run.model
    described = {
        "modules": repr(model),
        "parameters": [
            (name, list(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()
        ],
        "layers": wrapped_model.structure.layers_name,
        "recomputed": _described(wrapped_model.layers.context),
        "objective": wrapped_model.objective,
        "slot_tokens": run.collator.slot_tokens,
        "config": _config(model),
        "training": model.training,
        "by_sequence": wrapped_model.by_sequence is not None,
        "tile": None if wrapped_model.tiles is None else wrapped_model.tiles.tile or None,
    }
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _described(value: object) -> object:
    """Describe a function and what is bound to it, equally in every process."""
    if isinstance(value, partial):
        return [_described(part) for part in (value.func, *value.args, *value.keywords.items())]
    if isinstance(value, frozenset | tuple):
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None if value is None else str(value))


def _config(model: torch.nn.Module) -> object:
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    return repr(config) if to_dict is None else to_dict()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
