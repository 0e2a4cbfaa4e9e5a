"""Experiment trackers, which the first rank sends the metrics of every step to."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.config.run_config import Config
from lengthwise.core.atomic_write import write_text
from lengthwise.core.errors import InputError, LengthwiseError, first_line

if TYPE_CHECKING:
    from lengthwise.runtime.train.step_metrics import Row, StepCallback


class LastingTracker:
    """A tracker that ends no run: its first error is a warning, and training goes on without it."""

    def __init__(
        self, setting: str, begin: "Callable[[], StepCallback]", *, warn: Callable[[str], None], must_begin: bool
    ) -> None:
        """``setting``: which asks for it; ``must_begin``: or training goes on without it from the start.

        Raises:
            InputError: it cannot begin, and must.
        """
        self._setting, self._warn = setting, warn
        self._tracker: StepCallback | None = None
        self._has_failed = False
        try:
            self._tracker = begin()
        except LengthwiseError:
            raise  # such as for a package that is not installed
        except (Exception, SystemExit) as error:
            if must_begin:
                why = f"{type(error).__name__}: {first_line(error)}"
                raise InputError(f"{setting}: it cannot begin ({why}); mend that, or set {setting}=false") from error
            self._note(error, "training goes on without it")

    def on_step(self, row: "Row") -> None:
        """Send the numbers of the row, unless an earlier row could not be sent."""
        if self._tracker is None or self._has_failed:
            return
        try:
            self._tracker.on_step(row)
        except (Exception, SystemExit) as error:
            self._note(error, f"training goes on without it from step {row['step'] + 1} on")

    def close(self) -> None:
        """Send what is left."""
        if self._tracker is None:
            return
        try:
            self._tracker.close()
        except (Exception, SystemExit) as error:
            if not self._has_failed:
                self._note(error, "the last steps may be missing there")

    def _note(self, error: BaseException, follows: str) -> None:
        self._has_failed = True
        why = f"{type(error).__name__}: {first_line(error)}"
        self._warn(f"warning: {self._setting} failed ({why}): {follows}; the run's metrics.jsonl has all steps")


class TensorBoard:
    """Writes every number of a row as a scalar; a resumed run goes on with the same curves."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))
        self._has_begun = False

    def on_step(self, row: "Row") -> None:
        """Write the scalars of the row at its step."""
        if not self._has_begun:
            self._begin_at(row["step"])
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _begin_at(self, step: int) -> None:
        """Have TensorBoard forget what was written of this step and later ones before a resume."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._has_begun = True
        start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        self._writer.file_writer.add_event(start)


class WeightsAndBiases:
    """Logs every number of a row to Weights & Biases; a resumed run goes on with the same curves."""

    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="lengthwise",
            name=config.name,
            id=_digest(folder),
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def on_step(self, row: "Row") -> None:
        """Log the scalars of the row at its step."""
        self._run.log(_scalars(row), step=row["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Trackio:
    """Logs every number of a row to trackio; a resumed run goes on with the same curves."""

    def __init__(self, folder: Path, config: Config) -> None:
        import trackio

        self._trackio: Any = trackio
        name, document = f"{config.name}-{_digest(folder)}", config.model_dump(mode="json")
        trackio.init(project="lengthwise", name=name, config=document, resume="allow")

    def on_step(self, row: "Row") -> None:
        """Log the scalars of the row at its step."""
        self._trackio.log(_scalars(row), step=row["step"])

    def close(self) -> None:
        """Send what is left."""
        self._trackio.finish()


class MLflow:
    """Logs every number of a row to MLflow; a resumed run goes on with the same run, whose id is in the run folder."""

    FILE = "mlflow_run_id"

    def __init__(self, folder: Path, config: Config) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment("lengthwise")
        run_id = (folder / self.FILE).read_text() if (folder / self.FILE).is_file() else None
        run = mlflow.start_run(run_id=run_id) if run_id else mlflow.start_run(run_name=config.name)
        write_text(folder / self.FILE, run.info.run_id)
        mlflow.log_dict(config.model_dump(mode="json"), "config.json")

    def on_step(self, row: "Row") -> None:
        """Log the scalars of the row at its step."""
        self._mlflow.log_metrics(_scalars(row), step=row["step"])

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _digest(folder: Path) -> str:
    return blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()


def _scalars(row: "Row") -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
