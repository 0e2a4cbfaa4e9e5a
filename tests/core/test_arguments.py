"""Wrong values of arguments are refused by name, before anything is made of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lengthwise.core.arguments import arguments_checked, check_arguments, read_shapes
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import read_lengths, read_targets

HINTS = {
    "count": int | None, "share": float, "is_on": bool, "name": str | Path, "sizes": int | Sequence[int],
    "mode": Literal["none", "auto"] | None, "anything": object | None,
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"count": 3}, {"count": None}, {"count": np.int32(3)}, {"share": 1}, {"share": np.float32(0.5)},
        {"is_on": np.True_}, {"name": Path("a")}, {"sizes": 3}, {"sizes": np.array([1, 2])}, {"sizes": ()},
        {"mode": "auto"}, {"mode": None}, {"anything": {}}, {"without a hint": {}},
    ],
)  # fmt: skip
def test_values_of_their_type_are_taken(values):
    check_arguments(HINTS, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 2.5}, r"count=2\.5: give a whole number, or leave it out"),
        ({"count": True}, "count=True: give a whole number"),
        ({"count": float("nan")}, "count=nan"),
        ({"share": "0.5"}, r"share='0\.5': give a number$"),
        ({"share": None}, "share=None: give a number$"),
        ({"is_on": "no"}, "is_on='no': give True or False"),
        ({"name": 5}, "name=5: give a name or a path"),
        ({"sizes": "12"}, "sizes='12': give a whole number or a list of whole numbers"),
        ({"sizes": [1, 2.5]}, r"sizes=\[1, 2\.5\]"),
        ({"mode": "aoto"}, "mode='aoto' is not one of 'none', 'auto'; did you mean auto"),
    ],
)
def test_values_of_another_type_are_refused_by_name(values, message):
    with pytest.raises(InputError, match=message):
        check_arguments(HINTS, values)


def test_a_function_may_hold_its_arguments_against_its_hints():
    @arguments_checked
    def function(lengths: Sequence[int], *, seed: int = 0) -> int:
        return seed

    assert function([1], seed=3) == 3
    with pytest.raises(InputError, match="seed='3'"):
        function([1], seed="3")
    with pytest.raises(TypeError, match="sead"):
        function([1], sead=3)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths is empty"), ([5.9, 3.2], "one row of integers"), (["5"], "one row of integers"),
        ([None], "one row of integers"), ("abc", "one row of integers"), ([True], "one row of integers"),
        ([[1, 2], [3]], "rows of different sizes"), ([1 << 80], "one row of integers"), ([0], "at least 1 token"),
    ],
)  # fmt: skip
def test_lengths_are_whole_numbers(lengths, message):
    with pytest.raises(InputError, match=message):
        read_lengths(lengths)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([0.5, 0.5], "one whole number for each of 2 items"), ([-1, 2], "item 0 has -1 targets"),
        ([float("nan")] * 2, "one whole number"), ([None, 1], "one whole number"), ("abc", "one whole number"),
        ([0, 0], "0 for every item"), ([1], "1 numbers of targets for 2 items"), ([[1], [2, 3]], "one whole number"),
    ],
)  # fmt: skip
def test_targets_are_whole_numbers(targets, message):
    with pytest.raises(InputError, match=message):
        read_targets(targets, 2)
    assert read_targets([0, 1], 2).tolist() == [0, 1]


@pytest.mark.parametrize("shapes", [5, (4, 128), [(1.5, 8)], [("a", 8)], [(0, 8)], [(1, 2, 3)], "ab"])
def test_shapes_are_pairs_of_whole_numbers(shapes):
    with pytest.raises(InputError, match=r"give a list of \(rows, length\)"):
        read_shapes(shapes)
    assert read_shapes(iter([(4, np.int64(128))])) == [(4, 128)]
