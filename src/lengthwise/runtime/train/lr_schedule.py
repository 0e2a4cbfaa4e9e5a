"""The learning-rate as a function of the step alone, so that a resumed run cannot drift from its data."""

import math

from lengthwise.config.run_config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up over ``warmup_steps``, then the schedule down to ``min_lr_fraction`` at the last step."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (step - optim.warmup_steps) / max(1, num_steps - 1 - optim.warmup_steps))
    share = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.lr * (optim.min_lr_fraction + (1 - optim.min_lr_fraction) * share)
