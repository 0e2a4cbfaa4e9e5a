"""A rank on a CPU keeps the memory that it frees, unless its user has set the allocator."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from lengthwise.runtime.comm import freed_memory

ALLOCATE = """
import os, resource, torch
from lengthwise.runtime.comm.freed_memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()  # changes nothing: the user has set that
print(faults())
del os.environ["MALLOC_TRIM_THRESHOLD_"]
keep_freed_memory()
faults()
print(faults())
"""
NUM_BLOCKS = 8
PAGES_OF_A_BLOCK = (64 << 20) // resource.getpagesize()


def has_mallopt():
    try:
        return hasattr(ctypes.CDLL(None), "mallopt") and sys.platform == "linux"
    except (OSError, TypeError):
        return False


@pytest.mark.deep
@pytest.mark.skipif(not has_mallopt(), reason="the C library has no mallopt")
def test_blocks_that_are_freed_are_used_again_without_page_faults():
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", ALLOCATE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    as_set, kept = map(int, done.stdout.split())
    assert as_set >= NUM_BLOCKS * PAGES_OF_A_BLOCK, "as its user has set it"
    assert kept < NUM_BLOCKS * PAGES_OF_A_BLOCK / 2, "a block at a new place now and then"


def test_a_c_library_that_has_no_such_setting_is_left_as_it_is(monkeypatch):
    class Other:
        def __init__(self, name):
            pass

    monkeypatch.setattr(freed_memory.ctypes, "CDLL", Other)
    freed_memory.keep_freed_memory()
