"""Train Transformers on sequences of any length at the speed the lengths allow."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lengthwise.api.padded import pad
    from lengthwise.api.prepare import prepare
    from lengthwise.api.sampler import BatchSampler
    from lengthwise.api.trainer import Trainer, TrainerCallback
    from lengthwise.runtime.adapt.recompute import recompute
    from lengthwise.runtime.compile.padded import compile
    from lengthwise.runtime.train.scaled_lr import ScaledLR

__all__ = [
    "BatchSampler",
    "ScaledLR",
    "Trainer",
    "TrainerCallback",
    "__version__",
    "compile",
    "pad",
    "prepare",
    "recompute",
]

_HOMES = {
    "prepare": "lengthwise.api.prepare",
    "BatchSampler": "lengthwise.api.sampler",
    "pad": "lengthwise.api.padded",
    "compile": "lengthwise.runtime.compile.padded",
    "recompute": "lengthwise.runtime.adapt.recompute",
    "ScaledLR": "lengthwise.runtime.train.scaled_lr",
    "Trainer": "lengthwise.api.trainer",
    "TrainerCallback": "lengthwise.api.trainer",
}
"""Modules of what is imported when it is first asked for: planning needs no torch."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
