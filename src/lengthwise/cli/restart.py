"""What a rank finds that torchrun started again: how the run ended before, and the checkpoint to go on from."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.cli.claim import another_run_holds, loss_in_words
from lengthwise.cli.launch import LAUNCHER_FOLDER_VARIABLE, LAUNCHER_VARIABLE, RUN_FOLDER_VARIABLE
from lengthwise.cli.other_batches import named_settings
from lengthwise.cli.rank_errors import SAME_ERROR_WITHIN_S, is_first, note_for_torchrun
from lengthwise.config.run_config import Config, load_saved
from lengthwise.core.atomic_write import full_disk_behind, is_of_disk, reason, shell_word, shown, write_text
from lengthwise.core.errors import CommunicationError, InputError, LengthwiseError, Preempted
from lengthwise.core.run_folder import STATUS, RunFolder
from lengthwise.core.wording import counted
from lengthwise.data.sampler import OtherBatchesError
from lengthwise.runtime.state.checkpoint_files import latest, outlook, step_of
from lengthwise.runtime.state.damaged_checkpoint import DamagedCheckpoint

if TYPE_CHECKING:
    from lengthwise.runtime.comm.world import DistContext
    from lengthwise.runtime.train.trainer import TrainingLoop

RUNNING, DONE, PREEMPTED, FAILED, CRASHED = "running", "done", "preempted", "failed", "crashed"
"""States of a run. What crashed may go well if it is tried again; what failed would fail again."""
OVER = (DONE, PREEMPTED, FAILED)
PARENT_EVERY_S = 0.5
STATUS_BYTES = 2048
"""Of status.json while a run goes on, so that its end can be written over it."""


def num_restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def earlier_end(folder: RunFolder) -> int | None:
    """The exit code with which the ranks ended for good before torchrun started them again, if they did.

    torchrun knows only that a rank failed, not that it would fail again, and starts all of them up to --max-restarts
    times. It also stops and starts them, without counting, when a machine joins: then they go on. So they do where
    processes of another machine were signalled to stop, and a torchrun that was not goes on without it.
    """
    status = read_status(folder)
    is_earlier = status.get("attempt", num_restarts()) < num_restarts()
    if status.get("by_signal") and LAUNCHER_VARIABLE not in os.environ:
        return None
    return int(status["exit_code"]) if is_earlier and status.get("state") in OVER else None


def write_status(
    folder: RunFolder,
    state: str,
    *,
    exit_code: int | None = None,
    error: str = "",
    **notes: bool | str,
) -> None:
    """Record how the run goes, and the step of the newest checkpoint once it has ended.

    ``notes`` that are not empty are recorded too: ``by_signal``; ``has_begun`` and ``has_trained``, the first and the
    last step; ``stopped_early``, in words. Where the disk is full, the file is written over in place: it has been given
    room for that from the start. Where another run has taken the folder over, nothing is written.
    """
    if another_run_holds(folder):
        return
    document: dict[str, Any] = {"state": state, "exit_code": exit_code, "error": error, "attempt": num_restarts()}
    document |= {name: note for name, note in notes.items() if note}
    if state != RUNNING:
        document["safe_step"] = None
        with suppress(OSError, InputError):  # the latter: there is none
            document["safe_step"] = step_of(latest(folder.checkpoints))
    text = (json.dumps(document, indent=1) + "\n").ljust(STATUS_BYTES if state == RUNNING else 0)
    try:
        write_text(folder.path / STATUS, text)
    except OSError as refused:
        try:
            _write_over(folder.path / STATUS, document)
        except OSError:
            raise refused from None


def _write_over(file: Path, document: dict[str, Any]) -> None:
    """Write a JSON object over a file that is there, in as many bytes as it has."""
    with file.open("rb+") as stream:
        size = stream.seek(0, os.SEEK_END)
        content = json.dumps(document).encode()
        if len(content) > size:  # the error is what is long
            spare = max(0, len(document["error"]) - (len(content) - size) - 1)
            content = json.dumps({**document, "error": document["error"][:spare]}).encode()
        stream.seek(0)
        stream.write(content.ljust(size))


def note_begun(folder: RunFolder, *, has_trained: bool = False) -> None:
    """Let the launcher know that steps begin, from when on there is something to save; or that the last one is done."""
    if is_first():
        with suppress(OSError):
            write_status(folder, RUNNING, has_begun=True, has_trained=has_trained)


def early_stop(trainer: "TrainingLoop") -> str:
    """How validation ended a run before its last step, and how to go on; empty if it did not."""
    validation, num_steps = trainer.validation, trainer.config.train.num_steps
    if validation is None or not validation.should_stop or trainer.next_step >= num_steps:
        return ""
    return (
        f"stopped early after step {trainer.next_step:,} of {num_steps:,}: no lower validation loss in "
        f"{counted(validation.num_worse, 'validation')} (train.patience={validation.patience}); go on with: "
        f"lengthwise train --resume {shell_word(trainer.folder.path)} train.patience=null"
    )


def read_status(folder: RunFolder) -> dict[str, Any]:
    """Content of status.json; empty if it cannot be read."""
    try:
        return folder.read_json(STATUS)
    except InputError:
        return {}


def report_error(folder: RunFolder, error: Exception) -> bool:
    """Record why the run ends and return True, unless another rank has: errors of all ranks are told once."""
    if not is_first():
        time.sleep(SAME_ERROR_WITHIN_S)  # what all ranks meet at once, the first tells
    if another_run_holds(folder):
        sys.stderr.write(f"error: {loss_in_words(folder.path)}\n")
        return False
    state, words = _state_after(error), reason_of(error)
    exit_code = error.exit_code if isinstance(error, LengthwiseError) else LengthwiseError.exit_code
    if read_status(folder).get("state") in ((*OVER, CRASHED) if state == CRASHED else OVER):
        return False
    note_for_torchrun(words)
    has_launcher = os.environ.get(LAUNCHER_VARIABLE, str(os.getppid())) == str(os.getppid())
    is_read = RUN_FOLDER_VARIABLE in os.environ and has_launcher  # which reads the file and tells
    try:
        write_status(folder, state, exit_code=exit_code, error=words, by_signal=getattr(error, "by_signal", False))
    except OSError:
        is_read = False
    if not is_read:
        sys.stderr.write(f"error: {words}\n")
        sys.stderr.flush()
    return True


def reason_of(error: Exception) -> str:
    """Message of an error, in one text."""
    return str(error) if isinstance(error, LengthwiseError) else f"{type(error).__name__}: {error}"


def of_disk_in_words(error: Exception, folder: RunFolder) -> Exception:
    """An error of files or disks as a sentence that says what is safe; others as they are.

    Also one that only follows from a full disk, as what torch and other packages raise.
    """
    if isinstance(error, LengthwiseError):
        return error
    refusal = error if is_of_disk(error) else full_disk_behind(error)
    if refusal is None:
        return error
    assert isinstance(refusal, OSError)
    sentence = LengthwiseError(f"the run cannot go on ({reason(refusal)}); {outlook(folder.checkpoints)}")
    sentence.__cause__ = refusal
    return sentence


def _state_after(error: Exception) -> str:
    if isinstance(error, Preempted):
        return PREEMPTED
    if isinstance(error, CommunicationError):
        return CRASHED
    follows = error.__cause__ is not None and not isinstance(error.__cause__, OSError)
    if isinstance(error, LengthwiseError) and not (error.exit_code == LengthwiseError.exit_code and follows):
        return FAILED
    return CRASHED  # also a checkpoint that could not be written because a rank was gone


def settings_of(config: Config, folder: RunFolder, *, resume: bool) -> Config:
    """The settings to train with: those the run began with, if ranks are started again, whatever was edited since.

    Raises:
        InputError: the folder holds another run.
    """
    if resume:
        return config
    if not folder.config.is_file():
        if is_first():
            folder.check_new()  # a run that lost its config.yaml is not one
        return config
    begun = load_saved(folder.config)
    if num_restarts():
        return begun
    if is_first() and begun != config:
        folder.check_new()
    return config  # the same command again: it goes on


def end_with_parent(end: Callable[[], object]) -> Callable[[], bool]:
    """Call ``end``, which ends this rank, once torchrun is gone: nobody watches it, and a successor may write where it
    does. Returns what tells, at any moment, whether torchrun is gone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return lambda: False
    parent = int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())

    def is_gone() -> bool:
        return os.getppid() != parent

    def watch() -> None:
        while not is_gone():
            time.sleep(PARENT_EVERY_S)
        shutil.rmtree(os.environ.get(LAUNCHER_FOLDER_VARIABLE, ""), ignore_errors=True)
        end()

    threading.Thread(target=watch, daemon=True).start()
    return is_gone


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a run resumes from, if any."""

    folder: RunFolder
    resume: bool = False
    """Whether the user said so, so that there must be a checkpoint."""
    fall_back: bool = False
    """Whether an older checkpoint will do where the newest is damaged."""
    last_error: str = ""
    """What ended the ranks before torchrun started them again, as far as one of them could tell."""

    def restore(self, trainer: "TrainingLoop", world: "DistContext") -> None:
        """Go on from the newest complete checkpoint, if there is one. Every rank calls this.

        Raises:
            InputError: it is damaged, or of another run; or there is none to resume from.
        """
        from lengthwise.runtime.comm.objects import broadcast_json

        names = [str(path) for path in self._checkpoints()] if world.is_first else []
        paths = [Path(name) for name in broadcast_json(world, names)]  # others may see the folder late
        if world.is_first and num_restarts():
            every = trainer.config.train.checkpoint_every
            none = f"no checkpoint is complete yet (train.checkpoint_every={every}: fewer steps lose less)"
            where = f"from {paths[0].name}" if paths else f"from the first step: {none}"
            if self.last_error:
                sys.stderr.write(f"restart {num_restarts()}: the ranks ended with an error: {self.last_error}\n")
            sys.stderr.write(f"restart {num_restarts()}: going on {where}\n")
        problem = ""
        for path, older in zip(paths, [*paths[1:], None]):
            error = _try(trainer, path, world, self.folder)
            if error is None:
                if problem and world.is_first:
                    sys.stderr.write(f"warning: {problem}. Going on from an older one: {path}\n")
                if self.resume and world.is_first:
                    sys.stderr.write(f"{_way_on(trainer)} (checkpoint {shown(path)})\n{_left_alone(trainer)}")
                return
            if not broadcast_json(world, world.is_first and _is_damaged(path)):
                raise error
            words = error.problem if isinstance(error, DamagedCheckpoint) else str(error)
            problem = problem or words
            if not self.fall_back and older is not None:
                raise InputError(
                    f"{words}. With --fall-back, {older.name} is used instead, or one before it if need be"
                )
            if not self.fall_back:
                raise error
        if problem:
            all_names = ", ".join(path.name for path in paths)
            raise InputError(f"{problem}. All of {all_names} are damaged, so that the run has to be started anew")

    def _checkpoints(self) -> list[Path]:
        """The latest complete checkpoint and those before it; all there are if it cannot be told and falling back."""
        from lengthwise.runtime.state import checkpoint

        complete = checkpoint.candidates(self.folder.checkpoints)
        if not (complete or self.resume):
            return []
        try:
            return complete[complete.index(checkpoint.latest(self.folder.checkpoints)) :]
        except InputError:
            if not (complete and self.fall_back):
                raise
            return complete


def _way_on(trainer: "TrainingLoop") -> str:
    """Say from where a run that was resumed goes on, or that nothing of it is left."""
    if trainer.validation is not None and trainer.validation.outstanding is not None:
        return f"goes on with the validation after step {trainer.next_step}"
    if not trainer.is_done:
        return f"goes on from step {trainer.next_step}"
    if trainer.validation is not None and trainer.validation.should_stop:
        why = f"train.patience={trainer.validation.patience} ended it after step {trainer.next_step}"
    else:
        why = f"{trainer.next_step} of train.steps={trainer.config.train.num_steps} steps are done"
    return f"nothing is left to train: {why}"


def _left_alone(trainer: "TrainingLoop") -> str:
    """A line that names the checkpoints that did not lead to where the run goes on; empty if there are none."""
    from lengthwise.runtime.state import checkpoint

    counted = trainer.counted_checkpoints
    others = [path.name for path in checkpoint.candidates(trainer.folder.checkpoints) if path not in counted]
    if not others:
        return ""
    return (
        f"left as they are, until the run saves the same step: {', '.join(others)}; the run does not go on from them, "
        "so they do not count toward train.keep_checkpoints. Remove them once you need them no more\n"
    )


def _try(trainer: "TrainingLoop", path: Path, world: "DistContext", folder: RunFolder) -> InputError | None:
    """Resume from ``path``; the error that any rank met, the same on all of them."""
    from lengthwise.runtime.comm.objects import gather_json

    refusal = None
    try:
        trainer.resume(path)
    except OtherBatchesError as error:
        refusal = str(named_settings(error, trainer.config, folder)), ""
    except InputError as error:
        refusal = str(error), error.problem if isinstance(error, DamagedCheckpoint) else ""
    first = next((words for words in gather_json(world, refusal) if words is not None), None)
    if first is None:
        return None
    message, problem = first
    return DamagedCheckpoint(message, problem=problem) if problem else InputError(message)


def _is_damaged(path: Path) -> bool:
    from lengthwise.runtime.state import checkpoint

    try:
        checkpoint.verify(path)
    except InputError:
        return True
    return False
