"""The host's allocator where a rank computes on a CPU: what a micro-batch frees is kept for the next one.

glibc gives large blocks back to the kernel, which maps and clears them anew, page by page, for the next micro-batch:
up to 4 % of its processor time, more for larger packs than for smaller ones.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt(3)``."""
KEPT_BYTES = 1 << 30
"""Most bytes at the end of the heap that are kept, and the smallest block that goes back when it is freed."""
OLD_LIMIT = 32 << 20
"""The largest threshold of mapped blocks that older versions of glibc take."""
_OF_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let this process keep what it frees; nothing where the user has set that, or the C library is another."""
    if any(name in os.environ for name in _OF_USER):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # of macOS, musl and Windows
        return
    mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
    if not mallopt(_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(_MMAP_THRESHOLD, OLD_LIMIT)
