"""Processes that others start: how many there may be, and that none outlives the one it works for."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from lengthwise.core.errors import InputError, LengthwiseError

Result = TypeVar("Result")

MOST_PER_CORE = 32
"""Processes that a user may ask for; more only wait for each other, and a typing error should not stop a machine."""


def num_cores() -> int:
    """Cores of this machine."""
    return os.cpu_count() or 1


def check_processes(asked: int, *, setting: str, limit: int) -> None:
    """Raise ``InputError`` if ``asked`` processes are more than ``limit`` or than this machine can sensibly run."""
    maximum = min(limit, MOST_PER_CORE * num_cores())
    if asked > maximum:
        raise InputError(
            f"{setting} {asked}: this machine may run {maximum:,} at most, {MOST_PER_CORE} for each of its "
            f"{num_cores()} cores and never more than {limit:,}; lower it"
        )


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Within, Ctrl-C waits until the end; processes that are started meanwhile leave it to this one for good."""
    is_main, came = threading.current_thread() is threading.main_thread(), list[int]()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which processes inherit
    if is_main:  # another thread may still be given it
        handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if is_main:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def follow_parent() -> None:
    """Have this worker process leave Ctrl-C to the process that started it, and end when that one ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


class _WithoutScript(SpawnProcess):
    """A spawned process that does not run the user's script again, as it else would where that lacks a main guard."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        script = sys.modules["__main__"]
        hidden = {name: script.__dict__.pop(name) for name in ("__spec__", "__file__") if name in script.__dict__}
        script.__spec__ = None
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            vars(script).update(**hidden)


class LibraryContext(SpawnContext):
    """Spawned processes that need nothing of the user's script: what they are sent is this library's own."""

    Process = _WithoutScript


def call_in_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """What ``function`` returns, called in a process of its own, which is killed at once by whatever ends this call.

    For functions of other languages during which Python handles no signal, such as Ctrl-C. All is sent by pickle.

    Raises:
        LengthwiseError: the process was killed.
    """
    with ProcessPoolExecutor(1, LibraryContext(), initializer=follow_parent) as pool:
        worker = pool.submit(os.getpid).result()
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise LengthwiseError("the process at work was killed, perhaps for want of memory; free some") from None
        except BaseException:
            os.kill(worker, signal.SIGKILL)
            raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process of multiprocessing has one"
    parent.join()
    os._exit(1)
