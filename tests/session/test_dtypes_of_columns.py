"""Columns for the loss in any dtype of numbers: booleans, unsigned integers, halves, other byte orders."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns
from tests.session.structure_runs import OPTIONS, rows
from tests.session.structures import Plain

DTYPES = (
    "?",
    "u2",
    "u8",
    ">i4",
    "f2",
    np.longdouble,
    *(pytest.param(dtype, marks=pytest.mark.deep) for dtype in ("u1", "u4", "i1", ">f4")),
)
LARGE = 40000.0
"""Two of it are more than a number of 16 bits."""


def items(dtype, scale=1):
    draws = np.random.default_rng(0)
    return [{"input_ids": row, "flag": (scale * (draws.random(len(row)) < 0.4)).astype(dtype)} for row in rows()]


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_means_are_those_of_the_numbers(dtype):
    torch.manual_seed(0)
    model, given = Plain().double(), items(dtype)
    flags = [np.asarray(item["flag"], dtype=float) for item in given]
    expected = {
        "tokens": np.concatenate(flags).mean(),
        "sequences": np.mean([each.mean() for each in flags]),
        "targets": np.concatenate([each[:-1] for each in flags]).mean(),
    }
    run = lw.prepare(model, given, loss_columns=("flag",), **OPTIONS | {"steps": 2})
    for begin in (lambda: next(run.steps()), lambda: run.step(given)):
        step = begin()
        found = dict.fromkeys(expected, 0.0)
        total = 0.0
        for micro_batch in step:
            flag = micro_batch.column("flag")
            for over in expected:
                found[over] += float(micro_batch.mean(flag, over=over))
            total += float(micro_batch.sum(flag))
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        assert total == sum(map(np.sum, flags)) == step.total("flag")
        assert found == pytest.approx(expected, rel=1e-2 if dtype == "f2" else 1e-6)
    run.close()


def test_totals_of_halves_are_no_halves():
    torch.manual_seed(0)
    given = items(np.float16, LARGE)
    run = lw.prepare(Plain().double(), given, loss_columns=("flag",), **OPTIONS)
    expected = sum(float(item["flag"].astype(float).sum()) for item in given)
    assert next(run.steps()).total("flag") == expected > float(np.finfo(np.float16).max)
    run.close()


def read(**item):
    return ItemColumns(ExpectedColumns(loss_columns=("flag",))).read(0, {"input_ids": [5, 6, 7], **item})


def test_one_value_of_any_dtype_stands_for_the_whole_sequence():
    for value in (
        np.True_,
        np.array(True),
        torch.tensor(True),
        np.uint64(1),
        np.float16(1),
        torch.tensor(1).bfloat16(),
    ):
        assert read(flag=value).passed["flag"].tolist() == [1, 1, 1]


def test_integers_that_torch_has_not_are_refused():
    with pytest.raises(
        InputError, match=r"flag of item 0 has 18446744073709551615 in it; integers are up to 2\^63 - 1"
    ):
        read(flag=np.array([0, 1, 2**64 - 1], dtype=np.uint64))
    with pytest.raises(InputError, match="flag of item 0 is object of shape"):
        read(flag=np.array([0, None, 1], dtype=object))


def test_positions_in_16_bits_are_refused_as_what_they_are_and_ids_of_booleans_too():
    with pytest.raises(InputError, match="position_ids of item 0 is float32"):
        read(flag=1, position_ids=torch.arange(3).bfloat16())
    with pytest.raises(InputError, match="its ids are booleans: give them as integers"):
        ItemColumns(ExpectedColumns()).read(0, {"input_ids": np.array([True, False])})
