"""Checkpoints of ``lengthwise.Trainer``: which can be resumed from, and which are named where one cannot."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from lengthwise.core.atomic_write import shown
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.damaged_checkpoint import DamagedCheckpoint
from lengthwise.runtime.state.saver import NotSavedError

FOLDER = "lengthwise"
"""Of weights, optimizer and stream in a checkpoint; beside it lie the model and the state as transformers has them."""
_STATE = "trainer_state.json"
_PREFIX = "checkpoint-"
_log = logging.getLogger("lengthwise")


def check_resumable(folder: str) -> None:
    """Raise ``InputError`` unless a checkpoint has what a training by ``lengthwise.Trainer`` goes on from."""
    if not os.path.isdir(os.path.join(folder, FOLDER)):
        argument = _newest_beside(folder, _is_intact)
        way_out = "" if argument is None else f", or go on with {argument}"
        if not os.path.isdir(folder):
            raise InputError(f"there is no folder {folder} to resume from{way_out or '; train anew'}")
        raise InputError(
            f"{folder} has no folder {FOLDER!r}: it was not saved by lengthwise.Trainer, or with save_only_model. Load "
            f"its weights with from_pretrained and train anew{way_out}"
        )
    if problem := _state_problem(Path(folder)):
        raise InputError(f"{problem}; {_way_out(folder)}")


def resume_run(run: Run, folder: str, *, step: int) -> None:
    """Resume ``run`` from the checkpoint in ``folder``, which transformers' state says is of ``step``.

    Raises:
        InputError: it is damaged, with a checkpoint beside it that is not; or it is of another training.
    """
    try:
        run.resume(os.path.join(folder, FOLDER))
    except DamagedCheckpoint as error:
        raise InputError(f"{error.problem}; {_way_out(folder)}") from error
    if run.next_step != step:
        raise InputError(
            f"{shown(Path(folder))} is of step {step} by its {_STATE} and of step {run.next_step} by its folder "
            f"{FOLDER!r}; {_way_out(folder)}"
        )


def save_run(run: Run, folder: str) -> None:
    """Save ``run`` in the checkpoint in ``folder``; every rank calls this.

    Raises:
        LengthwiseError: it could not be written, with the newest one beside it.
    """
    try:
        run.save(os.path.join(folder, FOLDER), keep=1)
    except NotSavedError as error:
        argument = _newest_beside(folder, _is_complete)
        safe = "no checkpoint is complete yet, so that there is nothing to go on from"
        if argument is not None:
            safe = f"complete ones are as they were. Once the cause is gone, go on with {argument}"
        raise NotSavedError(error.problem, safe=safe, advice=error.advice) from error.__cause__


def num_ranks_of(folder: str) -> int:
    """How many ranks saved the checkpoint in ``folder``."""
    return int(checkpoint.read_state(checkpoint.latest(Path(folder) / FOLDER))["num_ranks"])


def log_if_done(run: Run) -> None:
    """Warn on the first rank if a run that was resumed has no step left."""
    if run.next_step >= run.num_steps and run.world.is_first:
        _log.warning(
            "nothing is left to train: the checkpoint is of step %d, and the training has %d steps; set a larger "
            "max_steps or num_train_epochs", run.next_step, run.num_steps,
        )  # fmt: skip


def log_if_anew(run: Run) -> None:
    """Warn on the first rank if a trainer that trains again, not from a checkpoint, loses what its optimizer kept."""
    if run.state is not None and run.state.settings.state_names and run.world.is_first:
        _log.warning(
            "train() again: the optimizer (%s) begins anew, where transformers keeps its state from the call before; "
            "to keep it, save checkpoints, set a larger num_train_epochs or max_steps, and call "
            "train(resume_from_checkpoint=True)", run.state.settings.name,
        )  # fmt: skip


def _way_out(folder: str) -> str:
    argument = _newest_beside(folder, _is_intact)
    if argument is None:
        return f"no other {_PREFIX}N that can be resumed from lies beside it: train anew"
    return f"go on from the newest intact checkpoint beside it: {argument}"


def _newest_beside(folder: str, is_good: Callable[[Path], bool]) -> str | None:
    """The argument that resumes from the newest good checkpoint beside ``folder``, or in it; None: there is none."""
    damaged = Path(folder)
    others = [path for path in damaged.parent.glob(f"{_PREFIX}*") if path.name != damaged.name]
    others += damaged.glob(f"{_PREFIX}*")  # that of all checkpoints was given
    numbered = [path for path in others if path.name.removeprefix(_PREFIX).isdigit()]
    for path in sorted(numbered, key=lambda path: int(path.name.removeprefix(_PREFIX)), reverse=True):
        if is_good(path):
            text = str(path)
            is_plain = text.isprintable() and not {'"', "\\"} & set(text)
            return "resume_from_checkpoint=" + (f'"{text}"' if is_plain else repr(text))
    return None


def _is_intact(path: Path) -> bool:
    """Whether a checkpoint has all that was saved; every byte is read."""
    try:
        checkpoint.verify(checkpoint.latest(path / FOLDER))
    except (InputError, OSError):
        return False
    return not _state_problem(path)


def _is_complete(path: Path) -> bool:
    try:
        checkpoint.latest(path / FOLDER)
    except (InputError, OSError):
        return False
    return not _state_problem(path)


def _state_problem(folder: Path) -> str:
    """What is wrong with the state of transformers in a checkpoint; an empty string: nothing."""
    file = folder / _STATE
    try:
        document = json.loads(file.read_text())
        return "" if isinstance(document["global_step"], int) else f"{file} has no number of a step"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        return f"{file} is damaged"
