"""Processes that others start: how many there may be, and that none outlives the one it works for."""

import multiprocessing
import os
import signal
import threading

from lengthwise.core.errors import InputError

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


def follow_parent() -> None:
    """Have this worker process leave Ctrl-C to the process that started it, and end when that one ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process of multiprocessing has one"
    parent.join()
    os._exit(1)
