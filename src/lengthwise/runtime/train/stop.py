"""Requests to stop a run, by a signal or by a file. Needs no torch, so that it works from a rank's first moment."""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from lengthwise.core.errors import INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_EVERY_S = 0.5
AGAIN_AFTER_S = 0.3
"""A Ctrl-C that comes sooner after another is the same one, passed on by a wrapper."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask for a stop; SIGHUP is left out where it is ignored, as under nohup."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class StopCause(IntEnum):
    """Why a run is to stop; of the causes of several ranks the greatest counts.

    A launcher that is gone counts more than a signal to another rank: torchrun signals its ranks also where it has lost
    the machine that hosts its store.
    """

    NONE = 0
    SIGNAL = 1
    LAUNCHER_GONE = 2
    """What started this rank is gone, and no signal came to it before."""
    FILE = 3


class StopRequest:
    """Notes SIGTERM, SIGINT and SIGHUP instead of dying of them, so that the step in flight ends and a checkpoint is
    written. The file ``stop`` in the run folder asks for the same, of all ranks and without a signal.

    Before the first step there is nothing to save: then a thread ends the process at once, even while the main thread
    waits for other ranks or a compiler. A second Ctrl-C ends it at once too, at any time.
    """

    def __init__(
        self,
        file: Path,
        *,
        end_start: Callable[[StopCause], object] | None = None,
        on_begin: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """``end_start``: ends the process if it is asked to stop before :meth:`begin_steps`; None: steps have begun.

        ``on_begin``, ``on_end``: called when they begin, and when the last one is done.
        """
        self._file, self._end_start, self._on_begin, self._on_end = file, end_start, on_begin, on_end
        self._is_received, self._has_begun = False, Event()
        self._is_launcher_gone: Callable[[], bool] = lambda: False
        if end_start is None:
            self._has_begun.set()
        self._interrupted_s: float | None = None
        self._is_closed, self._handlers = Event(), dict[signal.Signals, Any]()
        if current_thread() is not main_thread():  # others cannot take signals: the file still asks
            return
        self._pipe, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in stop_signals()}
        for number in self._handlers:
            signal.signal(number, self._note_received)
        Thread(target=self._watch, name="stop", daemon=True).start()

    @property
    def cause(self) -> StopCause:
        """Why the run is to stop, if it is."""
        if self._file.exists():
            return StopCause.FILE
        if self._is_received:
            return StopCause.SIGNAL
        return StopCause.LAUNCHER_GONE if self._is_launcher_gone() else StopCause.NONE

    def __bool__(self) -> bool:
        return self.cause is not StopCause.NONE

    def heed_launcher(self, is_gone: Callable[[], bool]) -> None:
        """Stop as soon as what started this process is gone."""
        self._is_launcher_gone = is_gone

    def look(self) -> None:
        """Have the thread look now whether to stop."""
        with suppress(OSError, AttributeError):  # closed, or without a thread
            os.write(self._wakeup, b"\0")  # so that the thread looks

    def begin_steps(self) -> None:
        """Note that steps begin: from now on the step in flight ends, and is saved, before the process stops."""
        self._has_begun.set()
        self._on_begin()

    def end_steps(self) -> None:
        """Note that the last step is done: nothing is in flight but its checkpoint."""
        self._on_end()

    def close(self) -> None:
        """Leave signals to whoever had them before."""
        if self._is_closed.is_set() or not self._handlers:
            return
        self._is_closed.set()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        with suppress(BrokenPipeError):  # it has looked
            os.write(self._wakeup, b"\0")  # so that the thread looks
        os.close(self._wakeup)

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            ready, _, _ = select.select([self._pipe], [], [], None if self._has_begun.is_set() else LOOK_EVERY_S)
            for number in os.read(self._pipe, 64) if ready else b"":
                self._note(number)
            if self and not self._has_begun.is_set() and self._end_start is not None:
                self._end_start(self.cause)
        os.close(self._pipe)

    def _note_received(self, number: int, frame: FrameType | None) -> None:
        self._is_received = True  # also seen by the thread, which is later; but the main thread may be busy for long

    def _note(self, number: int) -> None:
        if number not in SIGNALS:
            return
        self._is_received = True
        if number != signal.SIGINT:
            return
        now_s = time.monotonic()
        if self._interrupted_s is not None and now_s - self._interrupted_s > AGAIN_AFTER_S:
            os._exit(INTERRUPTED)
        self._interrupted_s = self._interrupted_s or now_s
