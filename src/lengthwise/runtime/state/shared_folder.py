"""Check that all ranks see one folder: where each machine has its own, files of a run would be scattered over them."""

import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lengthwise.core.atomic_write import shown
from lengthwise.core.errors import InputError

PATIENCE_S = 10.0
"""A file that another machine wrote may appear so much later on a network file system."""
_POLL_S = 0.1


def check_shared(folder: Path, gather: Callable[[Any], list[Any]], *, is_first: bool) -> None:
    """Raise an error on all ranks unless all of them see in ``folder`` a file that the first rank writes.

    ``gather`` returns what every rank gives, by rank; every rank calls this.

    Raises:
        InputError: some rank does not see it.
        OSError: the first rank cannot write it.
    """
    token = uuid.uuid4().hex if is_first else ""
    refusal = _write(folder / f".seen-{token}") if is_first else None
    token, refusal = gather((token, refusal))[0]
    if refusal is not None:
        number, words = refusal
        raise OSError(number, f"rank 0: {words}", str(folder))
    file = folder / f".seen-{token}"
    views = gather((platform.node(), _sees(file)))
    if is_first:
        with suppress(OSError):
            file.unlink()
    blind = [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(views) if not sees]
    if blind:
        others = f" and {len(blind) - 4} others" if len(blind) > 5 else ""
        raise InputError(
            f"{shown(folder)} is not one folder for all ranks: {', '.join(blind[: 4 if others else 5])}{others} do not "
            f"see what rank 0 on {views[0][0]} writes there; name a folder on a file system that all machines share"
        )


def _write(file: Path) -> tuple[int | None, str] | None:
    """Number and words of the error if it could not be written; nothing is left of it then."""
    try:
        file.write_text(file.name)
    except OSError as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return error.errno, error.strerror or str(error)
    return None


def _sees(file: Path) -> bool:
    until = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError):
            os.listdir(file.parent)  # has network file systems look again
            if file.read_text() == file.name:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
