"""Models of others compute micro-batches in slices on ranks and stages, and learn what their own loops teach them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.runtime.loop.runs import EXACT, Packs, assert_exact, step_on_ranks
from tests.runtime.loop.test_families import CASES, FEW, gpt2

RECOMPUTE = (True, False, True)
PACKS = ((2, 3), (6,), (0, 8, 4), (1,), (5, 7), (9,))
"""Of 22, 2, 24, 5, 39 and 17 tokens; sequences 2, 0, 5 and 9 have 21, 13, 30 and 17."""
SIZES = ((5, 9, 1, 7), (), (13, 3, 8), (2, 3), (29, 2, 8), (4, 4, 4, 5))
"""Slices within a sequence, of several, across boundaries, of one token; and packs that are not cut."""
ONE = (Packs(ranks=(0,), packs=PACKS, recompute=RECOMPUTE, slice_sizes=SIZES),)
TWO = (Packs(ranks=(0, 1), packs=PACKS, stage_layers=(1, 2), recompute=RECOMPUTE, slice_sizes=SIZES),)


@pytest.mark.parametrize(("name", "groups"), [("llama", ONE), ("gpt2", ONE), ("llama", TWO), ("gpt2", TWO)])
def test_a_family_in_slices_trains_as_its_own_loop_does(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], groups):
        assert_exact(CASES[name], found, name)
