"""What every command shares: one JSON document or a table on stdout, everything else on stderr.

Consoles print text as it is: rich's markup is off in messages, tables and progress bars, because names of runs, paths
and other libraries' errors may hold brackets. Other modules get their consoles here and never make their own.
"""

import io
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What would steer a terminal or turn its text round, instead of being seen."""


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
    sys.stdout.write(text + "\n")


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


class LastingStream(io.TextIOWrapper):
    """A stream of messages whose reader may go, as ``tee`` does at a Ctrl-C: what comes after is thrown away."""

    def write(self, text: str, /) -> int:
        """Write ``text``, or nothing if nobody reads it."""
        return self._unless_broken(partial(super().write, text)) or len(text)

    def flush(self) -> None:
        """Flush, unless nobody reads it."""
        self._unless_broken(super().flush)

    def _unless_broken(self, call: Callable[[], int | None]) -> int | None:
        try:
            return call()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return None


def prepare_streams() -> None:
    """Make stdout and stderr take any text: a closed stream is thrown away, a letter it cannot spell is escaped. What
    nobody reads on stderr ends nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr.flush()
        same = open(sys.stderr.fileno(), "wb", closefd=False)  # noqa: SIM115 - open until the process ends
        sys.stderr = LastingStream(same, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def _console(*, to_stderr: bool) -> "Console":
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return PlainConsole(stderr=to_stderr, highlight=False, markup=False, emoji=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    is_finite = not isinstance(value, float) or value - value == 0
    return value if is_finite else None
