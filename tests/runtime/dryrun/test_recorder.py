"""What a dry run counts of operations."""

import pytest
import torch

from lengthwise.runtime.dryrun.recorder import out_of_place

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "counted_as"),
    [(aten.addmm_.default, aten.addmm), (aten.addmm.default, aten.addmm), (aten.mm.default, aten.mm)],
)
def test_products_that_are_added_in_place_are_counted_as_others(func, counted_as):
    assert out_of_place(func) == counted_as
