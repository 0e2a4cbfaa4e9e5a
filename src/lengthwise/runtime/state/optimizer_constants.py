"""Which learning rate and weight decay count where an optimizer of the user's may say its own."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.runtime.state.optimizer import HANDED_LR


def with_base_lr(settings: OptimizerSettings, made: torch.optim.Optimizer) -> OptimizerSettings:
    """The settings with the rate that stands for those of all groups of ``made``, made of a matrix and a vector.

    The rate that was asked for; without one, the first that the optimizer says. Groups with others keep their ratio.

    Raises:
        InputError: a rate is asked for, and the optimizer says another one.
    """
    rates = [group.get("lr") for group in made.param_groups]
    numbers = [float(rate) for rate in rates if rate is not None]
    first = next((rate for rate in numbers if rate), next(iter(numbers), None))
    stated = _stated(settings, made, "lr")
    if settings.has_lr_function:
        _check_beside_function(settings, rates, stated, _default(made, "lr"))
    elif settings.asked_lr is not None:
        asked = settings.asked_lr
        if stated is not None and stated != asked:
            raise _two_rates(settings, [stated])
        if asked in numbers:
            return replace(settings, base_lr=asked)
        if len(set(numbers)) > 1 or first not in (None, _default(made, "lr")):
            raise _two_rates(settings, numbers)
    return replace(settings, base_lr=first)


def check_weight_decay(settings: OptimizerSettings, made: torch.optim.Optimizer) -> None:
    """Raise ``InputError`` if weight decay is asked for, and the optimizer says another one for its first group."""
    if not settings.asks_weight_decay:
        return
    asked, stated = settings.weight_decay, _stated(settings, made, "weight_decay")
    used = made.param_groups[0].get("weight_decay", asked)
    other = stated if stated is not None and stated != asked else used
    if other != asked:
        raise InputError(
            f"weight_decay={asked:g} is asked for, and optimizer={settings.name} has weight_decay={other:g}: say it "
            "once. That of prepare is of matrices alone; within the optimizer it is of all parameters of its group"
        )


def _check_beside_function(
    settings: OptimizerSettings, rates: Sequence[Any], stated: float | None, default: float | None
) -> None:
    """Raise ``InputError`` if a function gives the rate of each step, and some group says one all the same."""
    are_handed = [rate is HANDED_LR for rate in rates]
    if len(set(rates)) == 1 and stated is None and rates[0] is not None and not are_handed[0]:
        stated = None if float(rates[0]) == default else float(rates[0])
    if stated is not None and len(set(rates)) == 1:
        raise InputError(
            f"lr is a function of the step, and optimizer={settings.name} has lr={stated:g}: leave one of the two out"
        )
    if any(are_handed) and not all(are_handed):
        said = ", ".join(f"{float(rate):g}" for rate, is_handed in zip(rates, are_handed) if not is_handed)
        raise InputError(
            f"lr is a function of the step, and optimizer={settings.name} has lr={said} for {are_handed.count(False)} "
            f"of its {len(rates)} groups: let it say one for each group. The function then gives that of the first, "
            "and the others keep their ratio to it"
        )


def _two_rates(settings: OptimizerSettings, rates: Sequence[float]) -> InputError:
    shown = " and ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
    return InputError(
        f"lr={settings.asked_lr:g} is asked for, and optimizer={settings.name} has lr={shown}: say it once. Without lr "
        "in prepare each group has the rate that the optimizer says; with it, groups that say another keep their ratio "
        "to it, and one group at least has it"
    )


def _stated(settings: OptimizerSettings, made: torch.optim.Optimizer, name: str) -> float | None:
    """The constant that the user says for all groups; None: it is the default of the optimizer's class."""
    make: Any = settings.make
    while isinstance(make, partial):
        if make.keywords.get(name) is not None:
            return float(make.keywords[name])
        make = make.func
    value = made.defaults.get(name)
    if value is None or name not in _parameters(made) or _default(made, name) == float(value):
        return None
    return float(value)


def _default(made: torch.optim.Optimizer, name: str) -> float | None:
    """The value of a constant by default of the optimizer's class, or in it; None: there is none."""
    parameter = _parameters(made).get(name)
    value = made.defaults.get(name) if parameter is None else parameter.default
    return float(value) if isinstance(value, int | float | torch.Tensor) else None


def _parameters(made: torch.optim.Optimizer) -> dict[str, inspect.Parameter]:
    """The parameters of the constructor of the optimizer's class, by name."""
    try:
        return dict(inspect.signature(type(made)).parameters)
    except (TypeError, ValueError):  # of a class in C
        return {}
