"""Whether an optimizer's update of a parameter depends on others, which other ranks may update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.runtime.state.parameter_groups import changed_values
from lengthwise.runtime.state.trial_parameters import TrialParameters
from lengthwise.runtime.state.trial_updates import Updates, updated, updated_together

_SAME_UPDATE = 1e-6
"""The difference between two updates, as a share of the largest change, that rounding may make."""
_NUM_PAIR_STEPS = 3
"""Steps that parameters of layers are tried in, one for each scale of gradients."""


def coupling_of_kinds(settings: OptimizerSettings, trial: TrialParameters, together: Updates, num_steps: int) -> str:
    """How the update of one parameter depends on others of its own or another kind, in words.

    An empty string: it does not, or is random. ``together``: the updates of all parameters in ``num_steps`` steps.
    """
    if _is_random(settings, trial, together, num_steps):
        return ""
    parts = [[index] for index in range(len(trial.tried))]
    return _coupling(settings, trial, together, num_steps, parts)


def coupling_of_pairs(settings: OptimizerSettings, trial: TrialParameters) -> str | None:
    """How the update of one parameter depends on another one, of whole layers, in words; or an empty string.
    None: it cannot update parameters of these shapes.

    Such as of queries and keys of one layer, which an optimizer knows by name. Each two parameters are apart in one
    part at least: there are two parts for each binary digit of their numbers.
    """
    try:
        together = updated_together(settings, trial, num_steps=_NUM_PAIR_STEPS)
    except Exception:
        return None
    if _is_random(settings, trial, together, _NUM_PAIR_STEPS):
        return ""
    numbers = range(len(trial.tried))
    digits = range((len(numbers) - 1).bit_length())
    parts = [[number for number in numbers if number >> digit & 1 == side] for digit in digits for side in (0, 1)]
    return _coupling(settings, trial, together, _NUM_PAIR_STEPS, [part for part in parts if part])


def _is_random(settings: OptimizerSettings, trial: TrialParameters, together: Updates, num_steps: int) -> bool:
    """Whether updates depend on random numbers."""
    dtype = together.values[0].dtype
    again = updated(settings, trial, range(len(trial.tried)), num_steps=num_steps, seed=1, dtype=dtype)
    return not all(_is_same_update(*changes) for changes in zip(together.changes, again.changes))


def _coupling(
    settings: OptimizerSettings,
    trial: TrialParameters,
    together: Updates,
    num_steps: int,
    parts: Sequence[Sequence[int]],
) -> str:
    """How the update of some parameters alone differs from that of all, in words; or an empty string."""
    dtype = together.values[0].dtype
    for part in parts:
        try:
            alone = updated(settings, trial, part, num_steps=num_steps, dtype=dtype, beside=together)
        except Exception as error:
            return f"cannot update one parameter without the others ({type(error).__name__}: {error})"
        if not all(_is_same_update(together.changes[index], change) for index, change in zip(part, alone.changes)):
            return "updates a parameter otherwise where there are others"
        if name := _shared_value(together.optimizer, alone.optimizer):
            return f"keeps {name}, which depends on all parameters of a group"
    return ""


def _shared_value(together: torch.optim.Optimizer, alone: torch.optim.Optimizer) -> str:
    """The name of a value of a parameter group that is another where there are more parameters; or an empty string."""
    groups = changed_values(together)
    for position, values in changed_values(alone).items():
        for name in {**values, **groups[position]}:
            first, second = values.get(name), groups[position].get(name)
            is_real = isinstance(first, float) and isinstance(second, float)
            if not (is_real and _is_same_update(torch.tensor(first), torch.tensor(second))) and first != second:
                return name
    return ""


def _is_same_update(change: Tensor, other: Tensor) -> bool:
    """Whether two updates differ by no more than rounding, or are not finite alike."""
    tolerance = _SAME_UPDATE * float(change.abs().max())
    return torch.allclose(change, other, rtol=_SAME_UPDATE, atol=tolerance, equal_nan=True)
