"""Train Transformers on sequences of any length at the speed the lengths allow."""

from typing import TYPE_CHECKING, Any

from lengthwise.core.version import __version__

if TYPE_CHECKING:
    from lengthwise.integrations.dataloader import BatchSampler
    from lengthwise.integrations.hf_trainer import Trainer, TrainerCallback
    from lengthwise.integrations.padding import pad
    from lengthwise.runtime.compile.padded_model import compile
    from lengthwise.runtime.train.scaled_lr import ScaledLR
    from lengthwise.runtime.wrap.recompute_layers import recompute
    from lengthwise.session.prepare import prepare

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
    "prepare": "lengthwise.session.prepare",
    "BatchSampler": "lengthwise.integrations.dataloader",
    "pad": "lengthwise.integrations.padding",
    "compile": "lengthwise.runtime.compile.padded_model",
    "recompute": "lengthwise.runtime.wrap.recompute_layers",
    "ScaledLR": "lengthwise.runtime.train.scaled_lr",
    "Trainer": "lengthwise.integrations.hf_trainer",
    "TrainerCallback": "lengthwise.integrations.hf_trainer",
}
"""Modules of what is imported when it is first asked for: planning needs no torch."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
