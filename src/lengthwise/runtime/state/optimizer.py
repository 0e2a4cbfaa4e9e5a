"""The optimizers of torch on what a rank owns, and which of their state a checkpoint keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError

STATE = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adafactor": ("row_var", "col_var", "variance"),
}
"""Tensors that each optimizer keeps of a parameter, or of some parameters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Which optimizer, and its constants. Matrices decay, vectors do not."""

    name: str = "adamw"
    """One of ``STATE``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW and Adafactor: gradients smaller than this do not count as directions."""
    momentum: float = 0.9
    """Of SGD; 0: none."""
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in STATE:
            raise InputError(f"no optimizer {self.name!r}; known: {', '.join(STATE)}")

    @property
    def needs_whole_parameters(self) -> bool:
        """Whether the update of an element depends on its row and column: then parameters are not cut."""
        return self.name == "adafactor"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Of the tensors it keeps."""
        return () if self.name == "sgd" and not self.momentum else STATE[self.name]

    def make(self, decaying: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
        """The optimizer of these parameters; None of none."""
        groups = [
            {"params": list(parameters), "weight_decay": decay}
            for parameters, decay in ((decaying, self.weight_decay), (others, 0.0))
            if parameters
        ]
        if not groups:
            return None
        if self.name == "sgd":
            return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum)
        if self.name == "adafactor":
            return torch.optim.Adafactor(groups, lr=0.0, eps=(self.eps, 1e-3))
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps)

    def step_state(self, num_steps: int) -> dict[str, Tensor]:
        """What an optimizer keeps beside tensors of ``state_names`` after so many steps."""
        return {} if self.name == "sgd" else {"step": torch.tensor(float(num_steps))}
