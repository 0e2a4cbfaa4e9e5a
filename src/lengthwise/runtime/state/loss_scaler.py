"""Loss scaling for float16, whose gradients would else vanish: the rule of ``torch.amp.GradScaler``, on all ranks.

Losses are multiplied by a scale before their backward, and summed gradients are divided by it before they are clipped.
A step whose scaled gradient is not finite is skipped on all ranks, which know its norm over all of them, and the scale
falls; after enough steps in a row that were not, it grows. Scales are the first one times powers of two, which change
no digit of what does not overflow. Micikevicius et al. 2018, Mixed Precision Training, section 3.2.
"""

import math
from typing import Any

import torch

from lengthwise.config.optimizer_settings import OptimizerSettings

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
LEAST_SCALE = 2.0**-16
"""The lowest scale; gradients that overflow at it are not cured by a lower one."""
MOST_SCALE = torch.finfo(torch.float32).max
"""Losses are float32: a scale that is not finite there does not grow any more."""


class LossScaler:
    """The loss scale of a run, and how many steps it has skipped."""

    def __init__(self, first: float = FIRST_SCALE, *, growth_interval: int = 2000) -> None:
        """``first``: the scale of the first step; ``growth_interval``: steps in a row after which it doubles."""
        self.scale, self.growth_interval = first, growth_interval
        self.num_good = 0
        """Steps in a row that did not overflow since the scale changed."""
        self.num_skipped = 0
        """Steps whose gradients overflowed, since the run began."""

    @classmethod
    def of(cls, settings: OptimizerSettings, compute_dtype: torch.dtype) -> "LossScaler | None":
        """The scaler that an optimizer's settings ask for; None: losses are not scaled.

        Where they say nothing, losses of models that compute in float16 are.
        """
        if settings.loss_scale is None and compute_dtype != torch.float16:
            return None
        return cls(settings.loss_scale or FIRST_SCALE, growth_interval=settings.loss_scale_window)

    def update(self, *, has_overflowed: bool) -> None:
        """Set the scale for the next step."""
        self.num_good = 0 if has_overflowed else self.num_good + 1
        if has_overflowed:
            self.num_skipped += 1
            self.scale *= BACKOFF
        elif self.num_good == self.growth_interval:
            self.num_good = 0
            if self.scale * GROWTH <= MOST_SCALE:
                self.scale *= GROWTH

    @property
    def can_fall(self) -> bool:
        """Whether a lower scale may cure an overflow."""
        return self.scale > LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"scale": self.scale, "num_good": self.num_good, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.scale, self.num_good, self.num_skipped = (state[name] for name in ("scale", "num_good", "num_skipped"))
        assert self.scale > 0 and math.isfinite(self.scale), "checkpoints hold what a scaler was"


def scale_of(scaler: LossScaler | None) -> float:
    """What losses are multiplied by before their backward."""
    return 1.0 if scaler is None else scaler.scale
