"""What must be the same on all ranks of a prepared run before they compute: options, versions, model, data."""

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.version import __version__
from lengthwise.plan.outside_policy import policy_digest
from lengthwise.runtime.loop.fsdp2 import fsdp_modules
from lengthwise.runtime.models.checksum import checksum
from lengthwise.session.dataset_items import DatasetItems
from lengthwise.session.datasets import RunSequences

FULL_BYTES = 1 << 24
"""Sequences that are compared whole; of more, ``NUM_PROBES`` are, and what ranks share is compared at every step."""
NUM_PROBES = 64
_OF_ONE_RANK = {"frozen", "profile", "verbose", "timeout_s", "workers"}
"""Options that ranks may have different values of."""
_LIBRARIES = ("transformers", "peft", "numpy")


def to_compare(model: nn.Module, sequences: RunSequences, options: PrepareOptions) -> dict[str, Any]:
    """The tree of all of it, in plain values."""
    return {
        "options": {
            name: _plain(getattr(options, name)) for name in type(options).model_fields if name not in _OF_ONE_RANK
        },
        "policy": policy_digest(options.policy),
        "versions": {
            "lengthwise": __version__,
            "torch": torch.__version__,
            **{name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES},
        },
        "model": {"class": type(model).__qualname__, "training": model.training, **_tensors(model)},
        "corpus": _corpus(sequences),
    }


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Shapes, what is trained, and checksums of parameters and buffers; no checksums of shares that FSDP2 holds."""
    is_wrapped = bool(fsdp_modules(model))
    parameters = {
        name: f"{'trained' if parameter.requires_grad else 'frozen'}, {parameter.dtype} {list(parameter.shape)}"
        + ("" if is_wrapped else f", checksum {checksum(parameter.detach())}")
        for name, parameter in model.named_parameters()
    }
    buffers = {
        name: f"{buffer.dtype} {list(buffer.shape)}, checksum {checksum(buffer)}"
        for name, buffer in model.named_buffers()
    }
    return {"parameters": parameters, "buffers": buffers}


def _corpus(sequences: RunSequences) -> dict[str, Any]:
    """Number and lengths of the sequences, and digests of what is in them."""
    lengths = np.asarray(sequences.lengths.lengths)
    state = hashlib.blake2b(digest_size=8)
    if isinstance(sequences.store, DatasetItems):
        _add(state, sequences.store.checksums)  # of every item with all its columns
    else:
        for id in _probed(lengths, sequences):
            _add(state, sequences.tokens(id))
    return {
        "num_sequences": len(lengths),
        "num_tokens": int(lengths.sum()),
        "lengths": hashlib.blake2b(lengths.astype(np.int64).tobytes(), digest_size=8).hexdigest(),
        "content": state.hexdigest(),
    }


def _probed(lengths: np.ndarray, sequences: RunSequences) -> Iterator[int]:
    """All sequences if they are few, else some all over the corpus."""
    last = len(lengths) - 1
    size = np.asarray(sequences.tokens(0)).nbytes / int(lengths[0])
    if size * float(lengths.sum()) <= FULL_BYTES:
        return iter(range(len(lengths)))
    return (probe * last // (NUM_PROBES - 1) for probe in range(NUM_PROBES))


def _add(state: "hashlib.blake2b", values: Any) -> None:
    array = np.asarray(values)
    array = array.astype(np.int64) if array.dtype.kind in "iu" else array
    state.update(f"{array.dtype} {array.shape}".encode())
    state.update(np.ascontiguousarray(array).tobytes())


def _plain(value: Any) -> Any:
    """An option as numbers, texts and lists."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        numbers = value.detach().cpu()
        is_known_to_numpy = not value.is_floating_point() or value.dtype in (torch.float32, torch.float64)
        value = (numbers if is_known_to_numpy else numbers.double()).numpy()
    if isinstance(value, np.ndarray):
        state = hashlib.blake2b(digest_size=8)
        _add(state, value)
        return f"{list(value.shape)} {state.hexdigest()}"
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__qualname__, **{name: _plain(item) for name, item in asdict(value).items()}}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, partial):
        return [_plain(value.func), _plain(value.args), {name: _plain(item) for name, item in value.keywords.items()}]
    return getattr(value, "__qualname__", type(value).__qualname__)
