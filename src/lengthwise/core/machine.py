"""Which machine this is, and whether a process of it still runs."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """Boot and process namespace, where the system says so; else the name of the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def runs(pid: int, *, started: str = "") -> bool:
    """Whether a process of this machine runs; ``started``: when it began (:func:`start_time`); empty: not known."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    now = start_time(pid)
    return now != "dead" and (not now or not started or now == started)


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks; "dead": it has ended and waits to be buried; empty: unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "dead" if fields[0] in "ZX" else fields[19]
