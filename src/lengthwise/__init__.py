"""Train Transformers on sequences of any length at the speed the lengths allow."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lengthwise.api.prepare import prepare
    from lengthwise.api.sampler import BatchSampler
    from lengthwise.api.trainer import Trainer, TrainerCallback
    from lengthwise.runtime.adapt.recompute import recompute

__all__ = ["BatchSampler", "Trainer", "TrainerCallback", "__version__", "prepare", "recompute"]

_HOMES = {
    "prepare": "lengthwise.api.prepare",
    "BatchSampler": "lengthwise.api.sampler",
    "recompute": "lengthwise.runtime.adapt.recompute",
    "Trainer": "lengthwise.api.trainer",
    "TrainerCallback": "lengthwise.api.trainer",
}
"""Modules of what is imported when it is first asked for: planning needs no torch."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
