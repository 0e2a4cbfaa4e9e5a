"""A JSON document becomes a dataclass if every field is there, of its type and finite; else the field is named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from lengthwise.core.typed_json import from_document


@dataclass(frozen=True)
class Inner:
    """Within another."""

    size: int
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    """Of every kind of field."""

    name: str
    inner: Inner
    inners: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    either: int | str | None = None
    is_on: bool = False
    anything: Any = None
    by_name: Mapping[str, int] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    perhaps: Inner | None = None


GOOD = {"name": "a", "inner": {"size": 3}}


def test_values_become_what_the_fields_say():
    values = {
        "name": "a", "inner": {"size": 3, "share": 1}, "inners": [{"size": 1}, {"size": 2, "share": 0.25}],
        "pair": [7, "b"], "either": "c", "is_on": True, "anything": [1], "by_name": {"x": 1}, "plain": {"y": 2},
    }  # fmt: skip
    made = from_document(Outer, values)
    assert made == Outer(
        name="a", inner=Inner(3, 1.0), inners=(Inner(1), Inner(2, 0.25)), pair=(7, "b"), either="c", is_on=True,
        anything=[1], by_name={"x": 1}, plain={"y": 2},
    )  # fmt: skip
    assert type(made.inner.share) is float
    assert from_document(Outer, GOOD) == Outer(name="a", inner=Inner(3))
    for either in (5, "five", None):
        assert from_document(Outer, GOOD | {"either": either}).either == either


REFUSED = {
    "it must be an object, not [1]": [1],
    "it has no inner": {"name": "a"},
    "it has no inner.size": GOOD | {"inner": {"share": 1.0}},
    "it has an unknown field surprise": GOOD | {"zeal": 1, "surprise": 1},
    "it has an unknown field inner.colour": GOOD | {"inner": {"size": 3, "colour": 1}},
    "name must be text, not 7": GOOD | {"name": 7},
    "it has no perhaps.size": GOOD | {"perhaps": {"share": 1.0}},
    "inner must be an object, not 3": GOOD | {"inner": 3},
    "inner.size must be a whole number, not 3.0": GOOD | {"inner": {"size": 3.0}},
    "inner.size must be a whole number, not True": GOOD | {"inner": {"size": True}},
    "inner.share must be a number, not '1'": GOOD | {"inner": {"size": 3, "share": "1"}},
    "inner.share must be a number, not nan": GOOD | {"inner": {"size": 3, "share": float("nan")}},
    "inner.share must be a number, not inf": GOOD | {"inner": {"size": 3, "share": float("inf")}},
    "inner.share must be a number, not True": GOOD | {"inner": {"size": 3, "share": True}},
    "inners must be a list, not 3": GOOD | {"inners": 3},
    "inners[1].size must be a whole number, not '2'": GOOD | {"inners": [{"size": 1}, {"size": "2"}]},
    "pair must have 2 items, not 3": GOOD | {"pair": [1, "b", 2]},
    "pair[1] must be text, not 2": GOOD | {"pair": [1, 2]},
    "either must be a whole number or text or null, not 1.5": GOOD | {"either": 1.5},
    "is_on must be true or false, not 1": GOOD | {"is_on": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_missing_unknown_of_another_type_or_not_finite_is_named(message):
    with pytest.raises(ValueError) as refused:
        from_document(Outer, REFUSED[message])
    assert str(refused.value) == message


def test_a_whole_number_that_no_float_holds_is_no_number():
    assert from_document(Inner, {"size": 1, "share": -(1 << 999)}).share == -(2.0**999)
    for value in (1 << 1000, -(1 << 1000), 1 << 10_000):
        with pytest.raises(ValueError, match="share must be a number"):
            from_document(Inner, {"size": 1, "share": value})


def test_a_document_within_another_is_named_by_its_place():
    with pytest.raises(ValueError, match=r"^it has no model\.size$"):
        from_document(Inner, {}, "model")
    with pytest.raises(ValueError, match=r"^model must be an object, not 7$"):
        from_document(Inner, 7, "model")
