"""Ramps around packs in slices hold all sequences, in packs that grow before those and shrink behind them."""

from itertools import chain, pairwise

import numpy as np
import pytest

from lengthwise.plan.heterogeneous.sliced_ramps import CutPack, ramps_around

WORKS_S = np.array([4.0, 2.0, *[0.02] * 200])
PACKS = [CutPack((0,), 40), *(CutPack(tuple(range(k, 202, 8)), 1) for k in range(2, 10)), CutPack((1,), 20)]
OPTIONS = {"overhead_s": 0.002, "num_stages": 8, "forwards": 3.0}


def sizes(packs):
    return [float(WORKS_S[list(pack.positions)].sum()) for pack in packs]


@pytest.mark.parametrize("forwards", [3.0, 4.0])
def test_they_hold_every_sequence_once_and_leave_packs_in_slices_as_they_are(forwards):
    ramps = list(ramps_around(PACKS, WORKS_S, **OPTIONS | {"forwards": forwards}))
    assert len(ramps) > 8
    for ramp in ramps:
        assert sorted(chain.from_iterable(pack.positions for pack in ramp)) == list(range(202))
        assert [pack for pack in ramp if pack.slices > 1] == [PACKS[0], PACKS[-1]]
        before, behind = ramp[: (place := ramp.index(PACKS[0]))], ramp[place + 2 :]
        assert all(small <= large + 0.02 for small, large in pairwise(sizes(before)))
        assert all(small <= large + 0.02 for large, small in pairwise(sizes(behind)))
        assert max(sizes([*before, *behind])) < 1.25 * 0.1 + 0.02


def test_pipelines_without_slices_or_with_few_other_packs_have_none():
    assert not list(ramps_around(PACKS[1:-1], WORKS_S, **OPTIONS))
    assert not list(ramps_around(PACKS[:3], WORKS_S, **OPTIONS))
