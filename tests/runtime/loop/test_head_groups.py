"""Prepared models whose attention computes groups of heads train as their user's own loop does."""

import pytest

from tests.runtime.loop.runs import LENGTHS, Packs, assert_exact, step_on_ranks
from tests.runtime.loop.test_families import CASES

EVERY = tuple(range(len(LENGTHS)))
RECOMPUTE = {
    "none": {},
    "all": {"recompute": (True,) * 3},
    "selective": {"recompute": (True,) * 3, "keeps_attention": True},
}


def packs_of(num_ranks, count, recompute):
    """Three packs of uneven shards, the second and third recomputed; every other layer of the second is offloaded."""
    options = {"ranks": tuple(range(num_ranks)), "head_groups": count, **RECOMPUTE[recompute]}
    return (Packs(packs=(EVERY[:4], EVERY[4:6], EVERY[6:]), **options),)


@pytest.mark.parametrize(
    ("name", "num_ranks", "count", "recompute"),
    [
        ("llama", 3, 2, "all"),
        *(
            pytest.param(name, num_ranks, count, recompute, marks=pytest.mark.deep)
            for name in CASES for num_ranks in (1, 2, 3) for count in (2, 3, 4) for recompute in RECOMPUTE
        ),
    ],
)  # fmt: skip
def test_groups_of_heads_give_the_gradients_of_one_device(ranks, name, num_ranks, count, recompute):
    for losses_and_changes in ranks(num_ranks).run(step_on_ranks, CASES[name], packs_of(num_ranks, count, recompute)):
        assert_exact(CASES[name], losses_and_changes, f"{name}, {count} groups, recompute {recompute}")
