"""Rank pools, as the tests of the runtime have them."""

from tests.runtime.conftest import _one_thread, fresh_ranks, ranks  # noqa: F401
