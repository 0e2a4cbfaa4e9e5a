"""Signals to the process that starts ranks: before it has, while they run, and how to end them at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Self

from lengthwise.core.errors import Preempted
from lengthwise.core.launcher_variables import has_rank
from lengthwise.runtime.train.stop import AGAIN_AFTER_S, stop_signals

STOPPED_BY_TORCHRUN = "stopped by a signal, as torchrun sends where it is asked to stop or has lost another rank,"


class SignalsOfRanks:
    """While ranks run: the first signal asks them to stop, a second Ctrl-C kills them."""

    def __init__(self, on_stop: Callable[[int], None] | None) -> None:
        """``on_stop``: gets the number of the signal, and asks the ranks; they save and end by themselves."""
        self._on_stop = on_stop
        self._handlers: dict[int, Any] = {}
        self._first_s = 0.0
        self.received: list[int] = []

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            for number in stop_signals():
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def raise_again(self, *, has_on_stop: bool) -> None:
        """Raise what the signals received mean, now that the ranks have ended."""
        if signal.SIGINT in self.received:
            raise KeyboardInterrupt
        if self.received and not has_on_stop:
            raise Preempted(f"stopped by {signal.Signals(self.received[0]).name}; start it again")

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_again = bool(self.received) and time.monotonic() - self._first_s > AGAIN_AFTER_S
        self.received.append(number)
        if len(self.received) == 1:
            self._first_s = time.monotonic()
        if self._on_stop is None or (is_again and number == signal.SIGINT):
            kill_children()
            raise KeyboardInterrupt
        elif len(self.received) == 1:
            self._on_stop(number)


def kill_children() -> None:
    """Kill the processes that this one started and that lead a session, as ranks do, with all of theirs."""
    for child in children_of(os.getpid()):
        with suppress(OSError):
            if os.getsid(child) == child:
                os.killpg(child, signal.SIGKILL)


def children_of(process: int) -> list[int]:
    """The processes that ``process`` started; none where the system has no /proc, and torchrun ends them later."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children += [int(path.parent.name)] if parent == process else []
    return children


def stoppable_start() -> AbstractContextManager[None]:
    """While nothing runs yet, SIGTERM and SIGHUP raise ``Preempted``; Ctrl-C raises ``KeyboardInterrupt`` as ever.

    Whoever runs something takes the signals from it, and gives them back.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        by = STOPPED_BY_TORCHRUN if has_rank() else f"stopped by {signal.Signals(number).name}"
        raise Preempted(f"{by} while no step was trained")

    return _handled_by(stop)


class Terminated(BaseException):
    """SIGTERM or SIGHUP came to a command that runs no ranks; nothing but the end of the command handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command again to go on")
        self.exit_code = 128 + number
        """The exit code that shells give a process that died of this signal."""


def ended_by_signals() -> AbstractContextManager[None]:
    """Meanwhile, SIGTERM and SIGHUP raise ``Terminated`` once, so that workers, locks and progress bars end orderly."""

    def stop(number: int, frame: FrameType | None) -> None:
        for other in _without_ctrl_c():
            signal.signal(other, signal.SIG_IGN)  # the end is under way
        raise Terminated(number)

    return _handled_by(stop)


def _without_ctrl_c() -> list[signal.Signals]:
    return [number for number in stop_signals() if number != signal.SIGINT]


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Meanwhile, the main thread handles SIGTERM and SIGHUP by ``handler``; other threads cannot."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _without_ctrl_c()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
