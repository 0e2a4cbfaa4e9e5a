"""Positions are those of each sequence however a model makes them, and what looks like positions is left as it is."""

import pytest

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.runtime.harness import with_check
from tests.session.structure_runs import OPTIONS, build, outcomes, rows

EXACT = 1e-10


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_positions_are_those_of_each_sequence_in_packs_that_ranks_share(ranks, num_ranks):
    kinds = ("alone", "ulysses", "ring")[: 3 if num_ranks > 1 else 1]
    for found in ranks(num_ranks).run(
        with_check, outcomes, "position_forms.ManyForms", kinds=kinds, packing="always", recompute="none"
    ):
        assert isinstance(found, dict), found
        assert set(found) == set(kinds) and all(difference < EXACT for difference in found.values()), found


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", ["position_forms.SumsOfData", "position_forms.UpToTwelve"])
def test_what_only_looks_like_positions_is_not_answered(ranks, name):
    (found,) = ranks(1).run(with_check, outcomes, name)
    assert set(found) == {"alone"} and found["alone"] < EXACT
    with pytest.raises((CheckError, InputError), match=r"learns something else|one for each slot, from 1 on"):
        lw.prepare(build(name), rows(), steps=1, packing="always", **OPTIONS)
