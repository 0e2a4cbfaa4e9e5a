"""The learning rate of a step, from the function that a user gave."""

import math
from collections.abc import Callable

import torch

from lengthwise.runtime.state.parameter_groups import changed_rate


def learning_rate_of(
    lr: Callable[[int], float] | float, step: int, factor: float, optimizer: torch.optim.Optimizer | None = None
) -> tuple[float, str]:
    """Return the rate times ``factor`` and an empty string, or NaN and why there is none.

    ``optimizer``: whose rates a loop must not have set.

    Nothing is raised here: all ranks have to report before any of them raises.
    """
    way_out = "give one number from 0, the same on every rank, for each step"
    try:
        rate = float(lr(step) if callable(lr) else lr)
    except Exception as error:
        return math.nan, f"lr of step {step} failed with {type(error).__name__}: {error}; {way_out}"
    if not math.isfinite(rate) or rate < 0.0:
        return math.nan, f"lr of step {step} is {rate}; {way_out}"
    if problem := changed_rate(optimizer):
        return math.nan, problem
    return rate * factor, ""
