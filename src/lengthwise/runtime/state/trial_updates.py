"""Updates of a trial: the same values and gradients of small parameters, whatever others the optimizer has."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.runtime.state.optimizer import make_optimizer, step_once
from lengthwise.runtime.state.parameter_groups import ORIGIN, set_learning_rate
from lengthwise.runtime.state.trial_parameters import MOST_NUMBERS, TrialParameters

_TRIAL_LR = 1e-3
"""The learning rate where none is said yet."""
_SCALES = (1e-3, 1.0, 1e3)
"""Of the gradients of one step after another: limits of a norm leave small gradients as they are."""
_NUM_UPDATES = 240
"""Updates of single parameters that a trial makes, as far as the limits of its steps let it."""
_FEWEST_STEPS, _MOST_STEPS = 12, 40
_FEW_NUMBERS = 1 << 14
"""Numbers of all parameters up to which a trial makes more than the fewest steps."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Values of parameters after the steps of a trial, and the optimizer that updated them."""

    values: list[Tensor]
    changes: list[Tensor]
    optimizer: torch.optim.Optimizer
    path: list[list[Tensor]]
    """Values before each step; an empty list: they are too large to be noted."""


def num_steps_of(trial: TrialParameters) -> int:
    """How many steps a trial makes: more of few small parameters. The same on every rank, so no matter of time."""
    if _num_numbers(trial) > _FEW_NUMBERS:
        return _FEWEST_STEPS
    return max(_FEWEST_STEPS, min(_MOST_STEPS, _NUM_UPDATES // max(1, len(trial.tried))))


def made_of(settings: OptimizerSettings, trial: TrialParameters, indices: Sequence[int]) -> torch.optim.Optimizer:
    """An optimizer of all parameters that forgets all but those of ``indices``."""
    left_out = trial.all_but(indices)
    optimizer = make_optimizer(settings, decaying=trial.decaying, others=trial.others, leave_out=left_out)
    assert optimizer is not None, "there are parameters"
    return optimizer


def step(settings: OptimizerSettings, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer step once, with a learning rate."""
    set_rate(settings, optimizer)
    step_once(optimizer, settings)


def set_rate(settings: OptimizerSettings, optimizer: torch.optim.Optimizer) -> None:
    """Set the learning rate of a trial."""
    set_learning_rate(optimizer, settings.base_lr or settings.asked_lr or _TRIAL_LR)


def updated(
    settings: OptimizerSettings,
    trial: TrialParameters,
    indices: Sequence[int],
    *,
    num_steps: int,
    dtype: torch.dtype,
    seed: int = 0,
    decays: bool = True,
    beside: Updates | None = None,
) -> Updates:
    """The parameters of ``indices`` after the steps of a trial by an optimizer of these alone.

    ``beside``: the steps of all parameters, of which the others have the values before each step, as those have that
    other ranks update; None: zeros, or what they have.
    """
    numbers = torch.Generator().manual_seed(1)
    starts = [torch.rand(shape, generator=numbers, dtype=torch.float64) + 0.5 for shape in trial.shapes]
    slopes = [torch.rand(shape, generator=numbers, dtype=torch.float64) - 0.3 for shape in trial.shapes]
    trial.set_values({index: starts[index].to(dtype, copy=True) for index in indices})
    others = sorted(set(range(len(trial.tried))) - set(indices))
    torch.default_generator.manual_seed(seed)
    optimizer = made_of(settings, trial, indices)
    for group in () if decays else optimizer.param_groups:
        if ORIGIN in group:
            group["weight_decay"] = 0.0
    path: list[list[Tensor]] = []
    for number in range(num_steps):
        if beside is None and _num_numbers(trial) <= MOST_NUMBERS:
            path.append([parameter.detach().clone() for parameter in trial.tried])
        if beside is not None and beside.path:
            for index in others:
                trial.tried[index].data = beside.path[number][index].clone()
        for index in indices:
            slope = slopes[index] * (1 + 0.1 * number * (index + 1))
            trial.tried[index].grad = (slope * _SCALES[number % len(_SCALES)]).to(dtype)
        step(settings, optimizer)
    values = [trial.tried[index].detach().clone() for index in indices]
    changes = [value - starts[index].to(dtype) for index, value in zip(indices, values)]
    return Updates(values=values, changes=changes, optimizer=optimizer, path=path)


def updated_together(settings: OptimizerSettings, trial: TrialParameters, *, num_steps: int) -> Updates:
    """The updates of all parameters at once, in float64 or, by an optimizer that cannot, in float32."""
    everyone = range(len(trial.tried))
    try:
        return updated(settings, trial, everyone, num_steps=num_steps, dtype=torch.float64)
    except Exception:
        return updated(settings, trial, everyone, num_steps=num_steps, dtype=torch.float32)


def _num_numbers(trial: TrialParameters) -> int:
    return sum(map(prod, trial.shapes))
