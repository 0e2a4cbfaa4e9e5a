"""Errors of checkpoints that are damaged, unfinished or not there: what is wrong, and what can be done about it."""

from collections.abc import Sequence
from pathlib import Path

from lengthwise.core.errors import InputError


class DamagedCheckpoint(InputError):  # noqa: N818 - says what is the matter
    """A checkpoint that is damaged or incomplete: what is wrong, and the way out by what lies beside it.

    Attributes:
        problem: what is wrong, without a way out, for those who know of other checkpoints.
    """

    def __init__(self, message: str, *, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


def no_checkpoint(
    folder: Path, *, state_file: str, without_state: Sequence[Path], is_of_run: bool
) -> DamagedCheckpoint:
    """The error for a folder without a complete checkpoint.

    ``without_state``: folders of checkpoints that lack their ``state_file``; ``is_of_run``: whether the folder is that
    of `lengthwise train`, not one that a user's loop named.
    """
    problem = f"no complete checkpoint in {folder}"
    if without_state:
        reason = f"{without_state[-1]} has no {state_file}"
        way_out = f"copy {state_file} from where the checkpoint was saved, or go on from another checkpoint"
    elif is_of_run:
        reason = "the run stopped before its first one, or has not saved it yet"
        way_out = "if it is over, start it anew in another run_folder"
    elif not folder.exists():
        reason, way_out = "there is nothing of that name", "name the folder that was given to run.save"
    else:
        reason = "it has no folder of a step that was saved"
        way_out = "name the folder that was given to run.save, or begin with the first step, without run.resume"
    return DamagedCheckpoint(f"{problem}: {reason}; {way_out}", problem=f"{problem}: {reason}")


def wrong_pointer(
    pointer: Path, name: str, complete: Sequence[Path], *, state_file: str, is_of_run: bool
) -> DamagedCheckpoint:
    """The error for a ``pointer`` that names none of the checkpoints that are ``complete``, newest first."""
    lacks = f": it has no {state_file}" if name and (pointer.parent / name).is_dir() else ""
    problem = f"{pointer} names {name!r}, which is no complete checkpoint{lacks}"
    names = ", ".join(path.name for path in complete)
    way_on = "with: lengthwise train --resume RUN --fall-back" if is_of_run else f"by run.resume({str(complete[0])!r})"
    return DamagedCheckpoint(
        f"{problem}; write the name of another into it ({names}), or go on {way_on}", problem=problem
    )
