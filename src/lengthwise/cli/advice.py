"""Warnings while a run has still time to be started anew: work that a kill would lose, a disk that will be full."""

import shutil
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from lengthwise.config.run_config import TrainConfig
from lengthwise.core.atomic_write import shown
from lengthwise.core.wording import bytes_in_words, counted

if TYPE_CHECKING:
    from lengthwise.runtime.train.trainer import TrainingLoop

NUM_STEPS = 3
"""Steps after which their duration is known well enough; the first is slower than others."""
MUCH_S = 3600.0
"""Work that nobody likes to lose."""
OFTEN_S = 1800.0
"""Between checkpoints, as advised."""


def space_warning(trainer: "TrainingLoop") -> str | None:
    """A warning if the disk has no room for the checkpoints of a run to come; None if it has.

    One more than those that are kept is on the disk while the newest is written, and one that is only just known good.
    """
    folder, num_bytes = trainer.folder, trainer.checkpoint_bytes
    keep = trainer.config.train.keep_checkpoints
    num_more = max(1, keep + 1 - len(trainer.counted_checkpoints))
    free = shutil.disk_usage(folder.path).free
    if free >= num_more * num_bytes:
        return None
    return (
        f"warning: {shown(folder.path)} has {bytes_in_words(free)} free, {counted(num_more, 'checkpoint')} to come "
        f"need {bytes_in_words(num_more * num_bytes)} (train.keep_checkpoints={keep}): the run ends where the disk is "
        "full"
    )


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
        step_s, every, left = (
            median(self._times_s),
            self._train.checkpoint_every,
            self._train.num_steps - row["step"] - 1,
        )
        at_risk_s = step_s * min(every or left, left)
        often = max(1, round(OFTEN_S / step_s))
        if at_risk_s >= MUCH_S:
            self._warn(
                f"warning: with train.checkpoint_every={every} up to {at_risk_s / 3600:,.1f} hours of work are lost if "
                f"the run is killed; {often} would save about every {often * step_s / 60:,.0f} minutes"
            )

    def close(self) -> None:
        """Nothing is left to do."""
