"""Tables of positions that a forward makes longer have the rows of each sequence, in packs of any size."""

import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.session import pack_limit
from tests.runtime.harness import with_check
from tests.session.structure_runs import OPTIONS, build, outcomes, rows

EXACT = 1e-10
ONE_RANK = ["growing_forms.InPlace", "growing_forms.Rotaries"]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", ["growing_forms.Growing", "growing_forms.WithPositions"])
def test_packs_that_ranks_share_have_the_positions_of_each_sequence(ranks, name):
    for found in ranks(2).run(with_check, outcomes, name, kinds=("alone", "ulysses", "ring"), packing="always"):
        assert isinstance(found, dict), found
        assert len(found) == 3 and all(difference < EXACT for difference in found.values()), found


def after_small_comparisons(name):
    """Of a model that was compared on packs of no more than the longest sequence's slots."""
    pack_limit.MOST_SLOTS, before = 24, pack_limit.MOST_SLOTS
    try:
        return with_check(outcomes, name, kinds=("alone",), packing="always")
    finally:
        pack_limit.MOST_SLOTS = before


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("name", ["growing_forms.Growing", *ONE_RANK, "growing_forms.WithPositions"])
def test_tables_grow_before_packs_that_are_larger_than_any_that_was_compared(ranks, name):
    (found,) = ranks(1).run(after_small_comparisons, name)
    assert isinstance(found, dict), found
    assert set(found) == {"alone"} and found["alone"] < EXACT


def test_a_table_whose_rows_are_others_for_longer_calls_is_named():
    model = build("growing_forms.Scaled")
    with pytest.raises(
        InputError, match=r"table blocks\.0\.rotary\.cosines again for \d+ slots, and the first rows are"
    ):
        lw.prepare(model, rows(), steps=1, packing="always", **OPTIONS)


def test_weights_are_whole_where_tables_grow(ranks):
    for refused in ranks(2).run(outcomes, "growing_forms.Growing", kinds=("alone",), weights="by-layer"):
        assert "gathered layer by layer: its tables of positions are made by further forwards" in refused


def test_a_table_that_a_call_between_steps_makes_longer_is_used_from_then_on():
    model = build("growing_forms.Rotaries")
    with lw.prepare(model, rows(), steps=2, packing="always", **OPTIONS) as run:
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
            with run.plain(), torch.no_grad():
                model(torch.zeros(1, 200, dtype=torch.long))
    assert len(model.blocks[0].rotary.cosines) == 200


def test_rows_of_what_is_computed_of_positions_are_no_rows_by_number(ranks):
    """They would be those of another sequence, where the first of a pack is not the longest."""
    with pytest.raises(CheckError, match=r"learns something else .* 2, 11, 7 slots in one pack"):
        lw.prepare(build("growing_forms.ComputedAgain"), rows(), steps=1, packing="always", **OPTIONS)
    (found,) = ranks(1).run(with_check, outcomes, "growing_forms.ComputedAgain")
    assert found["alone"] < EXACT
