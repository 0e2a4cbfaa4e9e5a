"""The optimizers of torch on what a rank owns, and which of their state a checkpoint keeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError


def make_optimizer(
    settings: OptimizerSettings,
    *,
    decaying: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    on_host: bool = False,
) -> torch.optim.Optimizer | None:
    """The optimizer of these parameters; None if there are none.

    ``on_host``: whether a CPU updates what a GPU computes with. Then AdamW is torch's fused one, which reads and writes
    every number once, unless they are float64: there the update is to be the same to the last bit.
    """
    groups = [
        {"params": list(parameters), "weight_decay": decay}
        for parameters, decay in ((decaying, settings.weight_decay), (others, 0.0))
        if parameters
    ]
    if not groups:
        return None
    if settings.make is not None:
        return _made(settings, groups)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0, eps=(settings.eps, 1e-3))
    is_fused = on_host and all(parameter.dtype != torch.float64 for parameter in (*decaying, *others))
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=is_fused or None)


def step_state(settings: OptimizerSettings, num_steps: int) -> dict[str, Tensor]:
    """What an optimizer keeps beside tensors of ``settings.state_names`` after ``num_steps`` updates."""
    return {} if settings.make is not None or settings.name == "sgd" else {"step": torch.tensor(float(num_steps))}


def _made(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    assert settings.make is not None
    try:
        made = settings.make(groups)
    except Exception as error:
        raise InputError(
            f"optimizer={settings.name} cannot be made of parameter groups, one of matrices and one of vectors: "
            f"{type(error).__name__}: {error}; give what takes [{{'params': [...], 'weight_decay': 0.1}}, ...] alone, "
            "such as functools.partial(torch.optim.SGD, lr=0.1)"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"optimizer={settings.name} makes a {type(made).__name__}, which is no torch.optim.Optimizer")
    return made


def with_tensor_names(settings: OptimizerSettings) -> OptimizerSettings:
    """The settings with the names of the tensors that an optimizer of the user's keeps, after an update of two numbers.

    Raises:
        InputError: it cannot be made or used, or keeps what checkpoints cannot.
    """
    if settings.make is None:
        return settings
    matrix, vector = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    optimizer = make_optimizer(settings, decaying=[matrix], others=[vector])
    assert optimizer is not None
    matrix.grad, vector.grad = torch.ones(2, 3), torch.ones(3)
    try:
        optimizer.step()
    except Exception as error:
        raise InputError(
            f"optimizer={settings.name} cannot be stepped without arguments: {type(error).__name__}: {error}"
        ) from error
    kept_values = [item for state in optimizer.state.values() for item in state.items() if item[1] is not None]
    for name, value in kept_values:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            described = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"optimizer={settings.name} keeps {name} as a {described}, and checkpoints keep tensors of floating "
                "point; use an optimizer that keeps such tensors"
            )
    return replace(settings, tensors=tuple(dict.fromkeys(name for name, _ in kept_values)))
