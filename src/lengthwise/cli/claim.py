"""Who trains into a run folder: one launcher or one first rank at a time, and of several machines all into the same."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lengthwise.core.atomic_write import make_folder, reason, remove_empty, shell_word, shown
from lengthwise.core.errors import InputError
from lengthwise.core.lock import STALE_S, FolderLock, InUseError
from lengthwise.core.run_folder import LAUNCHER_LOCK, RANKS_LOCK, RunFolder

if TYPE_CHECKING:
    from lengthwise.runtime.comm.world import DistContext

TOKEN_VARIABLE = "LENGTHWISE_LOCK"
"""How ranks know that the launcher that holds their folder is the one that started them."""
_COPIED = "a run goes on in its own folder: make it writable, or cp -r {path} COPY and resume that"
"""What to do about the folder of a run that is resumed."""
_tokens: set[str] = set()
"""Of the locks of the run that this process is a rank of."""


@contextmanager
def claimed(folder: RunFolder, *, is_new: bool) -> Iterator[RunFolder]:
    """Hold a run folder while ranks train into it; a new one is made, and removed again if nothing was put in it.

    Raises:
        InputError: another run uses it, or left its files there, or it cannot be written.
    """
    way_out = "name another folder" if is_new else _COPIED.format(path=shell_word(folder.path))
    made = make_folder(folder.path, setting="run_folder", way_out=way_out)
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


def another_run_holds(folder: RunFolder) -> bool:
    """Whether a run that this process is no part of has taken the folder over, as while its machine slept."""
    tokens = {os.environ.get(TOKEN_VARIABLE, ""), *_tokens} - {""}
    return bool(tokens) and any(folder.lock(holder).is_of_another(tokens) for holder in (LAUNCHER_LOCK, RANKS_LOCK))


def loss_in_words(folder: Path) -> str:
    """Say that a folder is not this run's any more, and why."""
    what = "another run has taken it over" if folder.is_dir() else "it was removed or moved"
    return f"{shown(folder)} is not this run's any more ({what})"


class RanksClaim:
    """What the first rank holds while it trains, so that no other run begins even if its launcher is gone."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock: FolderLock | None = None
        self._checked_s = _clock_s()

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
        _tokens.clear()
        _tokens.add(lock.token)

    def share(self, world: "DistContext") -> None:
        """Let all ranks know what the first one holds. Every rank calls this."""
        from lengthwise.runtime.comm.objects import broadcast_json

        token = broadcast_json(world, self._lock.token if self._lock is not None else "")
        _tokens.clear()
        _tokens.add(token)

    def check(self) -> None:
        """End this process, on any rank, if another run has the folder: to be called before anything is written there.

        Only who slept for long can have been replaced, so that ranks but the first look again after a while alone.
        """
        if self._lock is not None:
            self._lock.check_held()
            return
        now_s = _clock_s()
        if now_s - self._checked_s > STALE_S / 2 and another_run_holds(self._folder):
            _end_lost(self._folder.path)
        self._checked_s = now_s

    @property
    def is_taken(self) -> bool:
        """Whether this process holds the folder."""
        return self._lock is not None and self._lock.is_held()

    def release(self) -> None:
        """Release the folder, if it was taken."""
        if self._lock is not None:
            self._lock.release()


def _acquire(lock: FolderLock, *, wait_s: float = 0.0, ends_if_lost: bool = False) -> None:
    folder, parent = lock.file.parent, os.environ.get(TOKEN_VARIABLE, "")
    try:
        lock.acquire(wait_s=wait_s, on_lost=partial(_end_lost, folder) if ends_if_lost else None, parent=parent)
    except OSError as error:
        raise InputError(f"run_folder {shown(folder)} cannot be written ({reason(error)}); name another") from None


def _end_lost(folder: Path) -> NoReturn:
    """End this process at once: whatever it writes now may be among the files of another run."""
    with suppress(OSError):
        sys.stderr.write(f"error: {loss_in_words(folder)}; the run ends\n")
        sys.stderr.flush()
    os._exit(1)


def _clock_s() -> float:
    """Seconds that also go on while the machine sleeps, where the system counts those."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def check_seen_by_all(folder: RunFolder, world: "DistContext") -> None:
    """Raise ``InputError`` on all ranks unless all of them see the first rank's folder. Every rank calls this."""
    from lengthwise.runtime.comm.objects import gather_json
    from lengthwise.runtime.state.shared_folder import check_shared

    try:
        check_shared(folder.path, partial(gather_json, world), is_first=world.is_first)
    except OSError as error:
        raise InputError(f"{shown(folder.path)} cannot be written ({reason(error)}); name another folder") from None
