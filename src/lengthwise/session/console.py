"""What every command shares: one JSON document or a table on stdout, everything else on stderr.

Consoles print text as it is: rich's markup is off in messages, tables and progress bars, because names of runs, paths
and other libraries' errors may hold brackets. Other modules get their consoles here and never make their own.
"""

import codecs
import errno
import io
import json
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from lengthwise.core.atomic_write import reason
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.launcher_variables import has_rank

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console
    from rich.progress import Progress

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What would steer a terminal or turn its text round, instead of being seen."""

_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINTR)
"""Why a message cannot be written where a later one may be."""

_PLAIN = str.maketrans({
    "\u00a0": " ", "\u202f": " ", "\u00b5": "u", "\u00b7": "-", "\u00d7": "x", "\u2013": "-", "\u2026": "...",
    "\u221e": "inf", "\u27e6": "[", "\u27e7": "]",
})  # fmt: skip
"""What stands for letters of this library's own texts where a stream cannot spell them."""
_SPELT_PLAINLY = "lengthwise.plain"
"""The name of the rule by which streams that cannot spell a letter write another, or escape it."""

WIDEST = 1 << 16
"""Columns that tables on stdout may take, whatever the terminal has: it breaks lines, and no name or number is cut."""

SCHEMA_VERSION = 1
"""Version of the documents under ``--json``; it grows when a field goes or changes its meaning."""


def emit_json(fields: dict[str, Any]) -> None:
    """Print the one document of a command under ``--json``; what is not a finite number becomes null."""
    version = {"schema_version": SCHEMA_VERSION}
    document = version | fields | version
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(document), indent=1, allow_nan=False)
    write_out(text + "\n")


def write_out(text: str) -> None:
    """Write to stdout at once; without a text, what is still to be written.

    Raises:
        LengthwiseError: it cannot be written, as where the disk under it is full.
        BrokenPipeError: its reader has what it wants.
    """
    try:
        if text:  # a full device refuses also nothing
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
        raise
    except OSError as error:
        raise _lost(error) from None


def _lost(error: OSError) -> LengthwiseError:
    """The error that stdout refuses a command's answer."""
    discard_stdout()
    return LengthwiseError(f"stdout cannot be written ({reason(error)}); the command's answer is lost")


def discard_stdout() -> None:
    """Throw away what is still to be written to stdout, so that python does not fail for it as it ends."""
    with suppress(OSError, ValueError):  # the latter: it is none of the system's, as in tests
        _turn_to_null(sys.stdout.fileno())


def stderr() -> "Console":
    """Where messages and progress go."""
    return _console(to_stderr=True)


def stdout() -> "Console":
    """Where tables go."""
    return _console(to_stderr=False)


def progress() -> "Progress":
    """A progress bar on stderr; silent when that is not a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip


def print_error(message: str) -> None:
    """Write an error to stderr; control characters of names and of other libraries are spelt out."""
    sys.stderr.write(f"error: {printable(message)}\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """The text with control characters spelt out, so that none reaches the terminal; ends of lines stay."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class LastingFile(io.FileIO):
    """The file of a stream of messages, of which none is worth its run: what cannot be written is thrown away.

    That is all that follows where the reader has gone, as ``tee`` does at a Ctrl-C, or the terminal; a full disk may
    have room again.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write ``data``, as far as that is possible."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and (written := super().write(rest)):
                rest = rest[written:]
        except OSError as error:
            if error.errno not in _PASSING:
                _turn_to_null(self.fileno())
        return size


class _LastingText:
    """The stream of whoever calls this library, such as a notebook; what it refuses is thrown away."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _AnswerText:
    """The stream of tables, whose errors say that it is stdout."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._tried(self._stream.write, text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, call: Any, *arguments: str) -> Any:
        try:
            return call(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _lost(error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Make stdout and stderr take any text: a closed stream is thrown away, a letter it cannot spell is put in another
    way. What cannot be written to stderr ends nothing; nor to stdout in ranks, which have no answer to give.
    """
    codecs.register_error(_SPELT_PLAINLY, _spelt_plainly)
    _open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_SPELT_PLAINLY)
        if type(stream) is io.TextIOWrapper and (name == "stderr" or has_rank()):
            with suppress(OSError):
                stream.flush()
            same = LastingFile(stream.fileno(), "w", closefd=False)
            options: dict[str, Any] = {"errors": _SPELT_PLAINLY, "line_buffering": True, "write_through": True}
            setattr(sys, name, io.TextIOWrapper(cast(BinaryIO, same), stream.encoding, **options))


def _spelt_plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """What an encoder writes in place of the letters that ``error`` is about, and where it goes on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", errors="backslashreplace").decode("ascii"), error.end


def _open_closed_streams() -> None:
    """Open the null device in place of each standard stream that the shell closed, also for processes started later.

    It takes the stream's number, which the next file that is opened would get else: with what is written to the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            _turn_to_null(number)
        else:  # a file has the number by now
            number = os.open(os.devnull, os.O_RDWR)
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - until the process ends


def _turn_to_null(number: int) -> None:
    """Have the file descriptor ``number`` lead to the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
        return
    os.dup2(null, number)
    os.close(null)


def _console(*, to_stderr: bool) -> "Console":
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        @property
        def file(self) -> Any:
            return _LastingText(super().file) if self.stderr else _AnswerText(super().file)

        @file.setter
        def file(self, new_file: Any) -> None:
            self._file = new_file

        def on_broken_pipe(self) -> None:
            raise  # what rich handles as it calls this, and would end the command with 1 for

    return PlainConsole(
        stderr=to_stderr, highlight=False, markup=False, emoji=False, width=None if to_stderr else WIDEST
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    is_finite = not isinstance(value, float) or value - value == 0
    return value if is_finite else None
