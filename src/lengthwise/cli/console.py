"""What every verb shares: one JSON document or a table on stdout, everything else on stderr."""

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def emit_json(document: Any) -> None:
    """The one document a verb prints under ``--json``."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def stderr() -> "Console":
    """Where messages and progress go."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def stdout() -> "Console":
    """Where tables go."""
    from rich.console import Console

    return Console(highlight=False)


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
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
