"""Train Transformers on sequences of any length at the speed the lengths allow.

Public are the names in ``__all__``, and what they take and give: the nouns of ``lengthwise.core``, and the results they
are documented to return. Everything else is private by convention, and may change in any version.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import lengthwise.plan  # noqa: F401 - the package sets this name when it is imported first; the function replaces it
from lengthwise.core.errors import missing_package
from lengthwise.core.version import __version__
from lengthwise.session.plan_lengths import plan

if TYPE_CHECKING:
    from lengthwise.cli.train_config import train
    from lengthwise.integrations.dataloader import BatchSampler
    from lengthwise.integrations.hf_trainer import Trainer, TrainerCallback
    from lengthwise.integrations.padding import pad
    from lengthwise.integrations.stream_batches import StreamBatches
    from lengthwise.runtime.compile.padded_model import compile
    from lengthwise.runtime.loop.run import Run
    from lengthwise.runtime.loop.step import Step
    from lengthwise.runtime.train.scaled_lr import ScaledLR
    from lengthwise.runtime.wrap.micro_batch import MicroBatch
    from lengthwise.runtime.wrap.recompute_layers import recompute
    from lengthwise.session.compare_lengths import compare
    from lengthwise.session.prepare import prepare
    from lengthwise.session.simulate_plans import simulate

__all__ = [
    "BatchSampler",
    "MicroBatch",
    "Run",
    "ScaledLR",
    "Step",
    "StreamBatches",
    "Trainer",
    "TrainerCallback",
    "__version__",
    "compare",
    "compile",
    "pad",
    "plan",
    "prepare",
    "recompute",
    "simulate",
    "train",
]

_HOMES = {
    "compare": "lengthwise.session.compare_lengths",
    "simulate": "lengthwise.session.simulate_plans",
    "train": "lengthwise.cli.train_config",
    "prepare": "lengthwise.session.prepare",
    "BatchSampler": "lengthwise.integrations.dataloader",
    "pad": "lengthwise.integrations.padding",
    "StreamBatches": "lengthwise.integrations.stream_batches",
    "compile": "lengthwise.runtime.compile.padded_model",
    "recompute": "lengthwise.runtime.wrap.recompute_layers",
    "ScaledLR": "lengthwise.runtime.train.scaled_lr",
    "Run": "lengthwise.runtime.loop.run",
    "Step": "lengthwise.runtime.loop.step",
    "MicroBatch": "lengthwise.runtime.wrap.micro_batch",
    "Trainer": "lengthwise.integrations.hf_trainer",
    "TrainerCallback": "lengthwise.integrations.hf_trainer",
}
"""Modules of names that are imported when they are first used: planning needs no torch."""
_WITHOUT_TORCH = {"compare", "simulate", "train"}


if not TYPE_CHECKING:  # type checkers know the names above, and refuse others

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("lengthwise"):
                raise
            raise missing_package(f"lengthwise.{name}", error.name) from None


def __dir__() -> list[str]:
    """List the public names; without torch those that work without it, so that ``help`` does."""
    try:
        has_torch = find_spec("torch") is not None
    except ImportError:  # of a finder that blocks it
        has_torch = False
    return sorted({*globals(), *__all__} - (set() if has_torch else _HOMES.keys() - _WITHOUT_TORCH))
