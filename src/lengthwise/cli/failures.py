"""Ends of commands that raise: one sentence and an exit code; a traceback only for a fault of ours."""

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lengthwise.cli.signals import Terminated
from lengthwise.core.errors import INTERRUPTED, InputError, LengthwiseError, missing_package

_RUN_FOLDER = "run_folder"
"""The attribute of an exception that names the run that failed."""
DEBUG_VARIABLE = "LENGTHWISE_DEBUG"
"""Set to 1, an unexpected error prints its traceback instead of naming a file that holds it."""

_MACHINE_ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of the machine at work; other errors of files say that a path cannot be used as given."""


class CommandFailed(Exception):  # noqa: N818 - carries an end, whatever it was
    """The end of a command: what to print on stderr, what to print under ``--json``, and the exit code."""

    run_folder: Path | None = None
    """Of the run that failed; None: the command is of no run, or had not begun one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message, self.exit_code = message, exit_code

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints, with the folder of the run that failed where it is there."""
        has_folder = self.run_folder is not None and self.run_folder.is_dir()
        folder = {"run_folder": str(self.run_folder)} if has_folder else {}
        return {"error": self.message, "exit_code": self.exit_code, **folder}


@contextmanager
def failures_of_run(folder: Path) -> Iterator[None]:
    """Within, whatever is raised is a failure of the run in ``folder``, which ``--json`` then names."""
    try:
        yield
    except BaseException as error:
        vars(error)[_RUN_FOLDER] = folder
        raise


def explain(error: BaseException) -> CommandFailed:
    """The end that an exception means for the user."""
    failed = _explain(error)
    failed.run_folder = vars(error).get(_RUN_FOLDER)
    return failed


def _explain(error: BaseException) -> CommandFailed:
    if isinstance(error, LengthwiseError):
        return CommandFailed(str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return CommandFailed("interrupted", INTERRUPTED)
    if isinstance(error, Terminated):
        return CommandFailed(str(error), error.exit_code)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if isinstance(error, MemoryError):
        return CommandFailed(
            "there is not enough memory for this; use a smaller corpus, cluster or number of steps"
            + (f" ({error})" if str(error) else ""),
            LengthwiseError.exit_code,
        )
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("lengthwise"):
        return _explain(missing_package("this command", error.name))
    return _explain_bug(error)


def _explain_os_error(error: OSError) -> CommandFailed:
    reason = error.strerror or str(error) or type(error).__name__
    names = " and ".join(str(name)[:300] for name in (error.filename, error.filename2) if name is not None)
    is_of_machine = error.errno in _MACHINE_ERRNOS or not names
    where = f"cannot use {names}: " if names else "reading or writing failed: "
    return CommandFailed(f"{where}{reason}", LengthwiseError.exit_code if is_of_machine else InputError.exit_code)


def _explain_bug(error: BaseException) -> CommandFailed:
    """Name the file that holds the traceback, or print the traceback if ``LENGTHWISE_DEBUG`` asks for it."""
    text = "".join(traceback.format_exception(error))
    first_line = (str(error).splitlines() or [""])[0][:500]
    words = f"unexpected {type(error).__name__}: {first_line}. This is a fault of lengthwise, please report it"
    if os.environ.get(DEBUG_VARIABLE):
        sys.stderr.write(text)
        return CommandFailed(words, LengthwiseError.exit_code)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="lengthwise-", suffix=".traceback", delete=False) as file:
            file.write(text)
        where = f"with {Path(file.name)}, which holds the traceback"
    except OSError:
        where = f"with the traceback that {DEBUG_VARIABLE}=1 prints"
    return CommandFailed(f"{words} {where}", LengthwiseError.exit_code)
