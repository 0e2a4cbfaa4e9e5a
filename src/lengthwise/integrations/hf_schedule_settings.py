"""What makes a learning-rate schedule: arguments and plain values of the scheduler, compared when a run is resumed."""

from collections.abc import Mapping
from typing import Any

import torch

_OF_THE_STEP = ("torch.optim.lr_scheduler", "transformers.optimization")
"""Modules whose schedulers make the rate of the step alone; those that follow a metric are refused."""
_PLACE = ("last_epoch",)


def is_of_the_step(scheduler: Any) -> bool:
    """Whether a scheduler's rates follow from how often it was stepped: not known of classes of a user's own."""
    parts = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__ in _OF_THE_STEP and all(map(is_of_the_step, parts))


def schedule_settings(args: Any, scheduler: Any, group: Mapping[str, Any], *, num_steps: int) -> dict[str, Any]:
    """What makes the schedule, in plain values by name.

    Args:
        args: the ``TrainingArguments``.
        scheduler: the scheduler as it was made, before its first step.
        group: the parameter group that it was made of.
        num_steps: of the training.
    """
    kwargs = {str(name): repr(value) for name, value in sorted((args.lr_scheduler_kwargs or {}).items())}
    return {
        "learning_rate": float(args.learning_rate),
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "lr_scheduler_kwargs": kwargs,
        "warmup steps": int(args.get_warmup_steps(num_steps)),
        "number of steps": num_steps,
        "scheduler": type(scheduler).__name__,
        **own_values(scheduler),
        **{f"{name} of groups": value for name, value in _numbers(group).items() if name in _SCHEDULED},
    }


_SCHEDULED = ("initial_lr", "min_lr", "max_lr")
"""What schedulers note in the groups of their optimizer."""


def own_values(scheduler: Any) -> dict[str, Any]:
    """The plain numbers and texts of a scheduler that say which rates it makes, not how far it is."""
    return {f"{name} of the scheduler": value for name, value in _numbers(scheduler.state_dict()).items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in _PLACE
    }  # fmt: skip


def changes_in_words(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, as "learning_rate 0.001 (0.01 in the checkpoint)"; an empty string: none does."""
    changed = [name for name in now if name in saved and saved[name] != now[name]]
    if "learning_rate" in changed and "initial_lr of groups" in changed:
        changed.remove("initial_lr of groups")  # the same rate
    return ", ".join(f"{name} {_shown(now[name])} ({_shown(saved[name])} in the checkpoint)" for name in changed)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {text}" for name, text in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]
