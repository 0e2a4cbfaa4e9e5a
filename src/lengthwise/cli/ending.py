"""What is left of a run whose ranks ended before its last step, in words, and as status.json says it."""

from contextlib import suppress
from signal import SIGINT

from lengthwise.cli.claim import another_run_holds, loss_in_words
from lengthwise.cli.restart import CRASHED, FAILED, OVER, PREEMPTED, RUNNING, read_status, write_status
from lengthwise.config.run_config import load_saved
from lengthwise.core.atomic_write import reason, shell_word, shown
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.state.checkpoint_files import candidates


def error_of(folder: RunFolder, *, killed: str, failed: str = "") -> LengthwiseError:
    """Why a run ended, with its exit code; ``killed``: which rank a signal killed, if one did; ``failed``: which one
    ended first.

    A rank that was killed cannot write status.json; then this does.
    """
    if another_run_holds(folder):
        return LengthwiseError(f"{loss_in_words(folder.path)}; the run ends")
    status = read_status(folder)
    state = status.get("state")
    if state in (FAILED, PREEMPTED):
        error = LengthwiseError(status["error"])
        error.exit_code = status.get("exit_code") or LengthwiseError.exit_code
        return error
    if not folder.path.is_dir():
        return LengthwiseError(
            f"{shown(folder.path)} was removed or moved while the run wrote to it. Where it is still there, by another "
            "name, go on with: lengthwise train --resume NAME"
        )
    words = f"{killed or status.get('error') or failed or 'a rank died'}. {way_on(folder)}"
    with suppress(OSError):
        if state in (RUNNING, CRASHED, None):
            write_status(folder, CRASHED, exit_code=LengthwiseError.exit_code, error=words)
    return LengthwiseError(words)


def ask_to_stop(folder: RunFolder, *, by: int) -> str:
    """Ask all ranks to save and end after the step in flight; what to tell the user, who asked for it by a signal."""
    at_once = "Ctrl-C once more ends it at once" if by == SIGINT else "Ctrl-C ends it at once"
    try:
        if not another_run_holds(folder):
            folder.stop.touch()
    except OSError as error:  # this runs in a signal's handler, where an error would end the launcher alone
        return f"the run cannot be asked to stop ({reason(error)}); {at_once}, without saving"
    status = read_status(folder)
    if status.get("state") in OVER:
        return "the run is over, and its processes end by themselves"
    if not status.get("has_begun"):
        return "stopping while ranks start; no step has begun, so there is nothing to save"
    if status.get("has_trained"):
        return "the last step is done; the run ends when its last checkpoint is complete"
    again = f"; {at_once}, without saving" if by == SIGINT else ""
    return f"stopping after the step, or the batch of a validation, in flight, with a checkpoint{again}"


def way_on(folder: RunFolder) -> str:
    """How to go on, or what is lost because there was no checkpoint yet."""
    if candidates(folder.checkpoints):
        return f"Go on with: lengthwise train --resume {shell_word(folder.path)}"
    try:
        num_steps = len(folder.read_metrics())
        every = load_saved(folder.config).train.checkpoint_every
    except InputError:
        return f"No checkpoint was complete yet: remove {shown(folder.path)} and start anew"
    setting = f"train.checkpoint_every={every}" + ("" if every else ", only at the end")
    return (
        f"No checkpoint was complete yet ({setting}), so the {num_steps:,} steps done are lost: remove "
        f"{shown(folder.path)} and start anew, with a train.checkpoint_every that is as many steps as may be lost"
    )
