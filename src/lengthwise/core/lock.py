"""Exclusive use of a folder by one process, on any file system that several machines may share.

The lock is a file created exclusively, which holds who made it; its time of change is moved forward while that process
lives. flock is not used, since network file systems often lack it. A lock whose process is gone is taken over: on the
same machine the process id and its start time tell, on others a lock that has not changed for ``STALE_S``.
"""

import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from lengthwise.core.atomic_write import shell_quoted
from lengthwise.core.errors import InputError
from lengthwise.core.machine import machine, runs, start_time

BEAT_S = 5.0
"""How often the holder of a lock shows that it lives."""
STALE_S = 60.0
"""A lock of another machine that has not changed for so long is taken over."""
MOMENT_S = 0.2
"""Another process that looks at a lock which seems stale moves it aside for less than this."""
_COMMAND_LENGTH = 200
"""Most characters of a command that a message names."""
_ATTEMPTS = 20


class InUseError(InputError):
    """Another process holds the folder."""


def _cut_short(command: str) -> str:
    return command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 3]}..."


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock."""

    token: str
    host: str
    machine: str
    """Tells machines, their boots and their containers apart, in which process ids mean something."""
    pid: int
    started: str
    """When the process began, as the kernel counts; empty: unknown."""
    command: str
    since: str
    parent: str = ""
    """Token of the lock of the process that started this one, if that holds one too."""

    @classmethod
    def this_process(cls, *, parent: str = "") -> "Holder":
        """The process that asks."""
        return cls(
            parent=parent,
            token=uuid.uuid4().hex,
            host=platform.node(),
            machine=machine(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            command=_cut_short(" ".join(map(shell_quoted, sys.argv))),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        )

    @classmethod
    def parse(cls, content: bytes) -> "Holder | None":
        """Who wrote ``content``; None: it is not written yet, or by something else."""
        try:
            document = json.loads(content)
            return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})
        except (ValueError, KeyError, TypeError):
            return None

    def is_alive(self) -> bool | None:
        """Whether the process runs; None: it is, or was, on another machine."""
        return runs(self.pid, started=self.started) if self.machine == machine() else None


class FolderLock:
    """A lock file in a folder. ``user`` says what holds it, such as "a run"."""

    def __init__(self, file: Path, *, user: str, way_out: str) -> None:
        self.file, self._user, self._way_out = file, user, way_out
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._on_lost: Callable[[], None] | None = None
        self.token = ""

    def acquire(self, *, wait_s: float = 0.0, on_lost: Callable[[], None] | None = None, parent: str = "") -> None:
        """Take the lock, or one that a process left behind.

        Args:
            wait_s: seconds to wait for another process.
            on_lost: called if it is taken away afterwards.
            parent: token of the lock of the process that started this one.

        Raises:
            InUseError: another process holds it, also after ``wait_s``.
            OSError: the folder cannot be written.
        """
        until = time.monotonic() + wait_s
        while True:
            try:
                self._acquire_now(parent)
                break
            except InUseError:
                if time.monotonic() >= until:
                    raise
                time.sleep(min(1.0, wait_s))
        self._stop, self._on_lost = threading.Event(), on_lost
        threading.Thread(target=self._beat, args=(self._stop,), name="lock", daemon=True).start()

    def check_free(self) -> None:
        """Raise ``InUseError`` if a living process holds the lock; one left behind is removed."""
        self._remove_stale()

    def is_of(self, token: str) -> bool:
        """Whether the file is the lock that was taken with ``token``."""
        holder = self._read()
        return holder is not None and holder.token == token

    def is_of_another(self, tokens: Collection[str]) -> bool:
        """Whether the file is a lock that was taken with none of ``tokens``, and by no child of one that was."""
        holder = self._read()
        return holder is not None and not {holder.token, holder.parent} & set(tokens)

    def _read(self) -> Holder | None:
        try:
            return Holder.parse(self.file.read_bytes())
        except OSError:
            return None

    def check_held(self) -> None:
        """Call ``on_lost`` at once if the lock was taken away: to be called before anything is written in the folder.

        A process that slept may have been replaced, and does not notice by itself for a moment.
        """
        if not self.is_held():
            time.sleep(MOMENT_S)
            if not self.is_held() and self._on_lost is not None and not self._stop.is_set():
                self._on_lost()

    def release(self) -> None:
        """Let the folder go, if this process holds it."""
        self._stop.set()
        if self._descriptor is None:
            return
        with suppress(OSError):
            if self.is_held():
                self.file.unlink()
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock meanwhile."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def is_held(self) -> bool:
        """Whether the file is still the one that this process made."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.file))
        except OSError:
            return False

    def _acquire_now(self, parent: str) -> None:
        for _ in range(_ATTEMPTS):
            holder = Holder.this_process(parent=parent)
            try:
                descriptor = os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._remove_stale()
                continue
            try:
                os.write(descriptor, json.dumps(asdict(holder)).encode())
                os.fsync(descriptor)
            except OSError:
                os.close(descriptor)
                self.file.unlink(missing_ok=True)
                raise
            self._descriptor, self.token = descriptor, holder.token
            return
        raise InUseError(f"{self.file.parent} is in use: other processes take and leave {self.file.name} all the time")

    def _remove_stale(self) -> None:
        """Remove the lock if its process is gone; raise ``InUseError`` if not."""
        try:
            content, changed_s = self.file.read_bytes(), self.file.stat().st_mtime
        except FileNotFoundError:
            return
        holder, age_s = Holder.parse(content), self._now_s() - changed_s
        is_alive = holder.is_alive() if holder else None
        if is_alive or (is_alive is None and age_s < STALE_S):
            raise InUseError(self._refusal(holder, age_s, is_here=bool(is_alive)))
        aside = self.file.with_name(f"{self.file.name}.stale-{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):  # another process was faster
            self.file.rename(aside)
            if aside.read_bytes() != content:  # it was, and this is its new lock
                with suppress(OSError):
                    os.link(aside, self.file)
            aside.unlink()

    def _refusal(self, holder: Holder | None, age_s: float, *, is_here: bool) -> str:
        if holder is None:
            return f"{self.file.parent} is in use by {self._user} that has just begun; {self._way_out}"
        who = f"process {holder.pid} on {holder.host} ({holder.command}), since {holder.since}"
        expiry = "" if is_here else (
            f" (its last sign of life is {max(0.0, age_s):.0f} s old; after {STALE_S:.0f} s the lock may be taken over)"
        )  # fmt: skip
        return f"{self.file.parent} is in use by {self._user}: {who}{expiry}; {self._way_out}"

    def _now_s(self) -> float:
        """The time of the file system, whose clock may differ from this machine's."""
        probe = self.file.with_name(f"{self.file.name}.probe-{uuid.uuid4().hex}")
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def _beat(self, stop: threading.Event) -> None:
        num_missed = 0
        while not stop.wait(BEAT_S if not num_missed else MOMENT_S):
            num_missed = 0 if self.is_held() else num_missed + 1  # another process may look at it for a moment
            if num_missed > 1:
                if self._on_lost is not None and not stop.is_set():
                    self._on_lost()
                return
            if not num_missed:
                with suppress(OSError, TypeError):
                    os.utime(self.file)
