"""A warning while a run has still time to be started anew: how much work a kill would lose."""

from collections.abc import Callable
from statistics import median
from typing import Any

from lengthwise.config import TrainConfig

NUM_STEPS = 3
"""Steps after which their duration is known well enough; the first is slower than others."""
MUCH_S = 3600.0
"""Work that nobody likes to lose."""
OFTEN_S = 1800.0
"""Between checkpoints, as advised."""


class CheckpointAdvice:
    """Warns once if more than an hour of work lies between checkpoints."""

    def __init__(self, train: TrainConfig, warn: Callable[[str], None]) -> None:
        self._train, self._warn = train, warn
        self._times_s: list[float] = []

    def on_step(self, row: dict[str, Any]) -> None:
        """Take the duration of a step."""
        if len(self._times_s) == NUM_STEPS:
            return
        self._times_s.append(row["perf/step_time_s"])
        if len(self._times_s) < NUM_STEPS:
            return
        step_s, every, left = median(self._times_s), self._train.checkpoint_every, self._train.steps - row["step"] - 1
        at_risk_s = step_s * min(every or left, left)
        often = max(1, round(OFTEN_S / step_s))
        if at_risk_s >= MUCH_S:
            self._warn(
                f"warning: with train.checkpoint_every={every} up to {at_risk_s / 3600:,.1f} hours of work are lost if "
                f"the run is killed; {often} would save about every {often * step_s / 60:,.0f} minutes"
            )

    def close(self) -> None:
        """Nothing is left to do."""
