"""Who trains into a run folder: one launcher or one first rank at a time, and of several machines all into the same."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.atomic_write import make_folder, reason, remove_empty, shown
from lengthwise.core.errors import InputError
from lengthwise.core.lock import STALE_S, FolderLock, InUseError
from lengthwise.core.run_folder import RunFolder

if TYPE_CHECKING:
    from lengthwise.runtime.comm.world import DistContext

LAUNCHER_LOCK, RANKS_LOCK = "launcher", "ranks"
TOKEN_VARIABLE = "LENGTHWISE_LOCK"
"""How ranks know that the launcher that holds their folder is the one that started them."""


@contextmanager
def claimed(folder: RunFolder, *, is_new: bool) -> Iterator[RunFolder]:
    """Hold a run folder while ranks train into it; a new one is made, and removed again if nothing was put in it.

    Raises:
        InputError: another run uses it, or left its files there, or it cannot be written.
    """
    made = make_folder(folder.path, setting="run_folder")
    lock = folder.lock(LAUNCHER_LOCK)
    try:
        _acquire(lock)
        folder.lock(RANKS_LOCK).check_free()  # ranks outlive a launcher that was killed, until they have saved
        if is_new:
            folder.check_new()
        os.environ[TOKEN_VARIABLE] = lock.token
        yield folder
    finally:
        os.environ.pop(TOKEN_VARIABLE, None)
        lock.release()
        remove_empty(made)


@contextmanager
def claimed_with_free_name(base: Path) -> Iterator[RunFolder]:
    """Hold a new run folder named ``base``, with a number after it where other runs begin in the same second.

    Raises:
        InputError: it cannot be written.
    """
    with ExitStack() as stack:
        for number in count(1):
            folder = RunFolder(base if number == 1 else base.with_name(f"{base.name}-{number}"))
            if os.path.lexists(folder.path):
                continue
            with suppress(InUseError):  # another process made it since
                stack.enter_context(claimed(folder, is_new=True))
                break
        yield folder


def check_unused(folder: RunFolder) -> None:
    """Raise ``InUseError`` if a run is going on in the folder."""
    for holder in (LAUNCHER_LOCK, RANKS_LOCK):
        with suppress(OSError):  # a folder that cannot be written is refused when it is claimed
            folder.lock(holder).check_free()


class RanksClaim:
    """What the first rank holds while it trains, so that no other run begins even if its launcher is gone."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock: FolderLock | None = None

    def take(self, *, is_restarted: bool) -> None:
        """Take the folder; after a restart, the first rank of before may seem alive for a while on another machine.

        Raises:
            InputError: another run uses it, or it cannot be written.
        """
        launcher = self._folder.lock(LAUNCHER_LOCK)
        if not launcher.is_of(os.environ.get(TOKEN_VARIABLE, "")):
            launcher.check_free()
        lock = self._folder.lock(RANKS_LOCK)
        _acquire(lock, wait_s=1.5 * STALE_S if is_restarted else 0.0, ends_if_lost=True)
        self._lock = lock

    @property
    def is_taken(self) -> bool:
        """Whether this process holds the folder."""
        return self._lock is not None and self._lock.is_held()

    def release(self) -> None:
        """Release the folder, if it was taken."""
        if self._lock is not None:
            self._lock.release()


def _acquire(lock: FolderLock, *, wait_s: float = 0.0, ends_if_lost: bool = False) -> None:
    folder = lock.file.parent

    def end() -> None:
        what = "another run has taken it over" if folder.is_dir() else "it was removed"
        with suppress(OSError):
            sys.stderr.write(f"error: {shown(folder)} is not this run's any more ({what}); the run ends\n")
            sys.stderr.flush()
        os._exit(1)  # whatever is written now may be among files of another run

    try:
        lock.acquire(wait_s=wait_s, on_lost=end if ends_if_lost else None)
    except OSError as error:
        raise InputError(f"run_folder {shown(folder)} cannot be written ({reason(error)}); name another") from None


def check_seen_by_all(folder: RunFolder, world: "DistContext") -> None:
    """Raise ``InputError`` on all ranks unless all of them see the first rank's folder. Every rank calls this."""
    from lengthwise.runtime.comm.objects import gather_json
    from lengthwise.runtime.state.shared_folder import check_shared

    try:
        check_shared(folder.path, partial(gather_json, world), is_first=world.is_first)
    except OSError as error:
        raise InputError(f"{shown(folder.path)} cannot be written ({reason(error)}); name another folder") from None
