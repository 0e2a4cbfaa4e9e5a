"""Settings of all tests."""

import gc
import os
import shutil
import signal
import sys
from collections import Counter

import pytest
from hypothesis import settings

from tests import warm
from tests.imported import leave_imported_alone

# One thread a process, before anything imports torch: threads of several workers would spin, waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ["HF_HUB_OFFLINE"] = "1"  # for ranks too, which import transformers before they import any test

# Files of tests, some twenty thousand, are made and removed in memory where there is room for them.
MEMORY, ROOM = "/dev/shm", 4 << 30
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
    os.environ["TMPDIR"] = MEMORY

# No test is about how long it takes. Properties are tried with fewer examples, and with all of them in deep runs.
settings.register_profile("quick", deadline=None, max_examples=10)
settings.register_profile("deep", deadline=None, max_examples=100)

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would its children


def _is_deep(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "deep"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples before any test says its own; start what all workers fork their ranks from."""
    settings.load_profile("deep" if _is_deep(config) else "quick")
    has_workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if has_workers and not config.pluginmanager.has_plugin("tests.no_torch"):
        warm.serve_workers()
        forked = f"popen//python={sys.executable} -m tests.worker_python"
        config.option.tx = [forked if spec == "popen" else spec for spec in config.option.tx]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Properties are a part of deep runs too, with more examples; so are cells beyond the ``first_cells`` of a test."""
    num_cells: Counter[str] = Counter()
    for item in items:
        if _is_deep(config) and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.deep)
        if (first := item.get_closest_marker("first_cells")) and not item.get_closest_marker("deep"):
            test = item.nodeid.partition("[")[0]
            num_cells[test] += 1
            if num_cells[test] > first.args[0]:
                item.add_marker(pytest.mark.deep)


gc.disable()  # until all is imported, of which next to nothing is garbage


def pytest_collection_finish() -> None:
    """Leave what was imported to itself: garbage collections would look at millions of objects again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what is left of a file to itself too, and what its first tests have imported."""
    if nextitem is not None:
        leave_imported_alone(always=nextitem.path != item.path)
