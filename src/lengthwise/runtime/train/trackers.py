"""Experiment trackers, which the first rank sends the metrics of every step to."""

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.config.run_config import Config

if TYPE_CHECKING:
    from lengthwise.runtime.train.step_metrics import Row


class TensorBoard:
    """Writes every number of a row as a scalar."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def on_step(self, row: "Row") -> None:
        """Write the scalars of the row at its step."""
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Logs every number of a row to Weights & Biases; a resumed run goes on with the same curves."""

    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        name = blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        self._run: Any = wandb.init(
            project="lengthwise",
            name=config.name,
            id=name,
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


def _scalars(row: "Row") -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
