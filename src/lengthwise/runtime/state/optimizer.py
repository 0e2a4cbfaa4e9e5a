"""The optimizers of torch on what a rank owns, and which of their state a checkpoint keeps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings, *, decaying: Sequence[nn.Parameter], others: Sequence[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The optimizer of these parameters; None if there are none."""
    groups = [
        {"params": list(parameters), "weight_decay": decay}
        for parameters, decay in ((decaying, settings.weight_decay), (others, 0.0))
        if parameters
    ]
    if not groups:
        return None
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0, eps=(settings.eps, 1e-3))
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps)


def step_state(settings: OptimizerSettings, num_steps: int) -> dict[str, Tensor]:
    """What an optimizer keeps beside tensors of ``settings.state_names`` after ``num_steps`` updates."""
    return {} if settings.name == "sgd" else {"step": torch.tensor(float(num_steps))}
