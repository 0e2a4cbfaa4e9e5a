"""Losses of the steps of a training, as logs take their mean: a step without a loss counts like the one before it."""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from lengthwise.core.atomic_write import write_text

_FILE = "losses.json"
"""In the folder of a checkpoint that this library writes."""


class StepLosses:
    """Sums of losses since the last log and over the training; steps before the first loss are left out of means."""

    def __init__(self, device: torch.device) -> None:
        """Start before the first step; ``device``: of the tensors that are logged."""
        self._device = device
        self._latest = math.nan
        self._sums, self._counts = [0.0, 0.0], [0, 0]

    def add(self, loss: float) -> None:
        """Count a step; ``loss``: nan, if no token of it has one."""
        if not math.isnan(loss):
            self._latest = loss
        if math.isnan(self._latest):
            return
        self._sums = [total + self._latest for total in self._sums]
        self._counts = [count + 1 for count in self._counts]

    def to_log(self, num_steps: int) -> torch.Tensor:
        """What divided by the ``num_steps`` since the last log is their mean loss; 0 if none of them has one."""
        return torch.tensor(
            self._sums[0] / max(1, self._counts[0]) * num_steps, dtype=torch.float64, device=self._device
        )

    def begin_log(self) -> None:
        """Forget the steps that were logged."""
        self._sums[0], self._counts[0] = 0.0, 0

    @property
    def mean(self) -> float:
        """The mean loss of the training; 0 if no step has one."""
        return self._sums[1] / max(1, self._counts[1])

    def save(self, folder: str) -> None:
        """Save the last loss that is known in the folder of a checkpoint."""
        latest = None if math.isnan(self._latest) else self._latest
        write_text(Path(folder) / _FILE, json.dumps({"latest": latest}) + "\n")

    def load(self, folder: str, log: list[dict[str, Any]]) -> None:
        """Go on after the last loss of a checkpoint; of one without it, after the last that was logged in ``log``."""
        logged = [float(entry["loss"]) for entry in log if entry.get("loss")]
        latest: float | None = logged[-1] if logged else None
        try:
            with open(os.path.join(folder, _FILE)) as file:
                latest = json.load(file)["latest"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._latest = math.nan if latest is None else float(latest)
