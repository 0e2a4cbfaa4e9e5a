"""Integers that remember how they follow from a number of slots, and what code decides by them.

Python code asks tensors for their sizes and branches on them: ``if T % 64 == 0``, ``if T > window``. In a mode of torch
functions a size that follows from the slots is an integer that also knows its formula, goes through arithmetic with it,
and notes each comparison. So one forward on real tensors says for which other numbers of slots the same would be
computed. What ``int()`` or ``len()`` takes is a plain integer again, which is noted as well.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Formula = Callable[[np.ndarray], Any]
"""From numbers of slots to the values of an expression."""

MOST_DECISIONS = 1 << 12
"""Different decisions that are kept."""
MOST_LETTERS = 256
"""Letters of a formula; longer ones, such as of counters in loops, are not followed."""
NEAR = 2
"""How many more or fewer a size may be than the slots, to be taken for slots and a constant."""
FEWEST_NEAR = 8
"""Slots at least, so that sizes near them, and multiples of them, are told from others."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A comparison that code made with a number that follows from the slots."""

    text: str
    """The comparison, in which T is the number of slots."""
    formula: Formula
    outcome: bool


@dataclass(kw_only=True)
class DecisionLog:
    """What a forward of ``num_slots`` slots decides by their number."""

    num_slots: int
    decisions: dict[str, Decision] = field(default_factory=dict)
    """The comparisons by their text, in the order in which they were first made."""
    is_lost: bool = False
    """Whether a number went where no comparison is seen."""
    is_open: bool = True
    """Whether the forward still runs; later comparisons, of numbers that a model keeps, do not count."""
    _texts: dict[int, tuple[str, Formula]] = field(default_factory=dict)
    """What sizes of a value are taken for."""

    def __post_init__(self) -> None:
        for more in range(-NEAR, NEAR + 1) if self.num_slots >= FEWEST_NEAR else (0,):
            text = "T" if not more else f"(T {'+' if more > 0 else '-'} {abs(more)})"
            self._texts[self.num_slots + more] = text, partial(operator.add, more)

    def size(self, value: int) -> int:
        """A size of a tensor: tracked, if it follows from the slots."""
        if value in self._texts:
            return TrackedInt(value, self, *self._texts[value])
        times, rest = divmod(value, self.num_slots)
        if rest or not times or self.num_slots < FEWEST_NEAR:
            return value
        return TrackedInt(value, self, f"({times} * T)", partial(operator.mul, times))

    def result(self, value: Any, text: str, formula: Formula) -> Any:
        """The result of an operation with a tracked number: tracked as well, if it is a number."""
        if not self.is_open or type(value) not in (int, float):
            return value
        if len(text) > MOST_LETTERS:
            self.is_lost = True
            return value
        if type(value) is float:
            return TrackedFloat(value, self, text, formula)
        if 2 * value > self.num_slots:  # others are sizes of something else as well
            self._texts.setdefault(value, (text, formula))
        return TrackedInt(value, self, text, formula)

    def note(self, outcome: bool, text: str, formula: Formula) -> bool:
        """Note a comparison and its outcome, which is returned."""
        if self.is_open and text not in self.decisions:
            if len(self.decisions) < MOST_DECISIONS and len(text) <= 2 * MOST_LETTERS:
                self.decisions[text] = Decision(text=text, formula=formula, outcome=outcome)
            else:
                self.is_lost = True
        return outcome

    def lose(self) -> None:
        """Note that code has taken a tracked number as a plain one."""
        self.is_lost |= self.is_open


class TrackLengths(TorchFunctionMode):
    """A mode in which sizes of tensors that follow from the slots are tracked in a log."""

    def __init__(self, log: DecisionLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func not in _SIZES:
            return result
        if isinstance(result, tuple):
            return torch.Size(map(self._log.size, result))
        size = self._log.size(result)
        if func is Tensor.__len__ and size is not result:
            self._log.lose()  # len() makes a plain integer of whatever it is given
            return result
        return size


_SIZES = frozenset({
    Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__  # type: ignore[attr-defined]
})  # fmt: skip


class TrackedNumber:
    """What tracked integers and floats share: the plain number, its log, and its formula."""

    plain: Any
    log: DecisionLog
    text: str
    formula: Formula

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.plain), (self.plain,)

    def __bool__(self) -> bool:
        formula = self.formula
        return self.log.note(bool(self.plain), f"{self.text} != 0", lambda slots: formula(slots) != 0)

    def __int__(self) -> int:
        self.log.lose()
        return int(self.plain)

    def __float__(self) -> float:
        self.log.lose()
        return float(self.plain)

    def __trunc__(self) -> int:
        return int(self)

    def __floor__(self) -> Any:
        return self._mapped(floor(self.plain), "floor", lambda values: np.floor(values).astype(np.int64))

    def __ceil__(self) -> Any:
        return self._mapped(ceil(self.plain), "ceil", lambda values: np.ceil(values).astype(np.int64))

    def __round__(self, digits: Any = None) -> Any:
        rounded = round(self.plain) if digits is None else round(self.plain, digits)
        return self._mapped(rounded, "round", lambda values: np.round(values, digits or 0))

    def __neg__(self) -> Any:
        return self._mapped(-self.plain, "-", operator.neg)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._mapped(abs(self.plain), "abs", np.abs)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def _mapped(self, value: Any, name: str, function: Callable[[Any], Any]) -> Any:
        formula = self.formula
        return self.log.result(value, f"{name}({self.text})", lambda slots: function(formula(slots)))


class TrackedInt(TrackedNumber, int):
    """An integer that knows how it follows from a number of slots."""

    def __new__(cls, value: int, log: DecisionLog, text: str, formula: Formula) -> "TrackedInt":
        """``text``, ``formula``: of the slots, in words and as a function."""
        return _made(int.__new__(cls, value), value, log, text, formula)

    def __hash__(self) -> int:
        self.log.lose()  # as the key of a table, which compares it with few others
        return hash(self.plain)


class TrackedFloat(TrackedNumber, float):
    """A float that knows how it follows from a number of slots."""

    def __new__(cls, value: float, log: DecisionLog, text: str, formula: Formula) -> "TrackedFloat":
        """``text``, ``formula``: of the slots, in words and as a function."""
        return _made(float.__new__(cls, value), value, log, text, formula)

    def __hash__(self) -> int:
        self.log.lose()
        return hash(self.plain)


def _made(number: Any, value: Any, log: DecisionLog, text: str, formula: Formula) -> Any:
    number.plain, number.log, number.text, number.formula = value, log, text, formula
    return number


def _operands(number: TrackedNumber, other: Any, *, is_reflected: bool) -> tuple[list[Any], list[str], list[Formula]]:
    """The plain values, texts and formulas of both operands, in their order."""
    of_other: tuple[Any, str, Formula] = other, str(other), lambda slots: other
    if isinstance(other, TrackedNumber):
        of_other = other.plain, other.text, other.formula
    pair = [(number.plain, number.text, number.formula), of_other]
    values, texts, formulas = zip(*(pair[::-1] if is_reflected else pair))
    return list(values), list(texts), list(formulas)


def _not_followed(number: TrackedNumber, other: Any) -> Any:
    """What an operation with something that is no plain number returns; NumPy's numbers do it themselves."""
    if isinstance(other, np.generic):
        number.log.lose()
    return NotImplemented


def _combining(function: Callable[[Any, Any], Any], sign: str, *, is_reflected: bool) -> Callable[..., Any]:
    def combine(self: TrackedNumber, other: Any) -> Any:
        if not isinstance(other, int | float):
            return _not_followed(self, other)
        values, (left, right), (first, second) = _operands(self, other, is_reflected=is_reflected)
        formula = lambda slots: function(first(slots), second(slots))  # noqa: E731
        return self.log.result(function(*values), f"({left} {sign} {right})", formula)

    return combine


def _comparing(function: Callable[[Any, Any], Any], sign: str) -> Callable[..., Any]:
    def compare(self: TrackedNumber, other: Any) -> Any:
        if not isinstance(other, int | float):
            return _not_followed(self, other)
        values, (left, right), (first, second) = _operands(self, other, is_reflected=False)
        formula = lambda slots: function(first(slots), second(slots))  # noqa: E731
        return self.log.note(bool(function(*values)), f"{left} {sign} {right}", formula)

    return compare


_ARITHMETIC = {
    "add": (operator.add, "+"), "sub": (operator.sub, "-"), "mul": (operator.mul, "*"),
    "floordiv": (operator.floordiv, "//"), "truediv": (operator.truediv, "/"), "mod": (operator.mod, "%"),
    "pow": (operator.pow, "**"),
}  # fmt: skip
_OF_BITS = {
    "and": (operator.and_, "&"), "or": (operator.or_, "|"), "xor": (operator.xor, "^"),
    "lshift": (operator.lshift, "<<"), "rshift": (operator.rshift, ">>"),
}  # fmt: skip
_COMPARISONS = {
    "eq": (operator.eq, "=="), "ne": (operator.ne, "!="), "lt": (operator.lt, "<"), "le": (operator.le, "<="),
    "gt": (operator.gt, ">"), "ge": (operator.ge, ">="),
}  # fmt: skip

for _kind, _names in ((TrackedInt, {**_ARITHMETIC, **_OF_BITS}), (TrackedFloat, _ARITHMETIC)):
    for _name, (_function, _sign) in _names.items():
        setattr(_kind, f"__{_name}__", _combining(_function, _sign, is_reflected=False))
        setattr(_kind, f"__r{_name}__", _combining(_function, _sign, is_reflected=True))
    for _name, (_function, _sign) in _COMPARISONS.items():
        setattr(_kind, f"__{_name}__", _comparing(_function, _sign))
