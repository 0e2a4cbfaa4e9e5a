"""How many processes may be asked for."""

import pytest

from lengthwise.core import processes
from lengthwise.core.errors import InputError
from lengthwise.core.processes import MOST_PER_CORE, check_processes


def test_processes_have_a_limit_and_one_by_the_cores_of_the_machine(monkeypatch):
    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    check_processes(2 * MOST_PER_CORE, setting="--workers", limit=512)
    with pytest.raises(InputError, match=r"--workers 65: this machine may run 64 at most, 32 for each of its 2 cores"):
        check_processes(2 * MOST_PER_CORE + 1, setting="--workers", limit=512)
    monkeypatch.setattr(processes, "num_cores", lambda: 1000)
    with pytest.raises(InputError, match=r"may run 512 at most.* never more than 512; lower it"):
        check_processes(513, setting="--workers", limit=512)
