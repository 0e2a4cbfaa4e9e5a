"""Rank pools as the tests of the runtime have them, and the command line in this process."""

from tests.cli.conftest import cli  # noqa: F401
from tests.runtime.conftest import _one_thread, fresh_ranks, ranks, unchecked  # noqa: F401
