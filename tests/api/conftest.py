"""Rank pools, as the tests of the runtime have them."""

from tests.runtime.conftest import _one_thread, ranks  # noqa: F401
