"""How many processes may be asked for, and calls in one of their own."""

import multiprocessing
import os
import signal
import time
from threading import Timer

import pytest

from lengthwise.core import processes
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.processes import MOST_PER_CORE, call_in_process, check_processes


def test_processes_have_a_limit_and_one_by_the_cores_of_the_machine(monkeypatch):
    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    check_processes(2 * MOST_PER_CORE, setting="--workers", limit=512)
    with pytest.raises(InputError, match=r"--workers 65: this machine may run 64 at most, 32 for each of its 2 cores"):
        check_processes(2 * MOST_PER_CORE + 1, setting="--workers", limit=512)
    monkeypatch.setattr(processes, "num_cores", lambda: 1000)
    with pytest.raises(InputError, match=r"may run 512 at most.* never more than 512; lower it"):
        check_processes(513, setting="--workers", limit=512)


def test_a_call_in_a_process_of_its_own_returns_or_raises():
    assert call_in_process(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_in_process(divmod, 7, 0)
    with pytest.raises(LengthwiseError, match="was killed, perhaps for want of memory"):
        call_in_process(os._exit, 9)


def test_a_call_in_a_process_of_its_own_ends_at_ctrl_c():
    interrupt = Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        call_in_process(time.sleep, 3600)
    assert not multiprocessing.active_children()
