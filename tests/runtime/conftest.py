from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from tests import short_profiles  # noqa: F401
from tests.runtime.harness import COMPARISONS, RankPool, where_asked


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)`` is a pool of n CPU ranks, shared by the session and replaced after a failure."""
    pools: dict[int, RankPool] = {}

    def get(num_ranks: int) -> RankPool:
        if num_ranks not in pools or not pools[num_ranks].is_usable:
            pools[num_ranks] = RankPool(num_ranks)
        return pools[num_ranks]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], RankPool]]:
    """``fresh_ranks(n)`` is n ranks that have run nothing yet, for tests of what memory they use."""
    pools: list[RankPool] = []

    def get(num_ranks: int) -> RankPool:
        pools.append(RankPool(num_ranks))
        return pools[-1]

    yield get
    for pool in pools:
        pool.close()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the comparison before a run, most of ``prepare``, where a test compares by itself or not at all."""
    for module, name in COMPARISONS:
        monkeypatch.setattr(f"lengthwise.session.{module}.{name}", partial(where_asked, None))
