"""Numbers of specifications held against their bounds where a specification is made, each by its field's name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lengthwise.core.arguments import is_whole
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the number of a field may be."""

    minimum: float = 0
    maximum: float
    """``math.inf``: also infinitely many."""
    is_whole: bool = False
    is_above: bool = False
    """Whether it must be above ``minimum``."""
    also: float | None = math.nan
    """One value more, such as None for what is not known; NaN: there is none."""

    @property
    def in_words(self) -> str:
        """Such as "a whole number from 1 to 65,536"."""
        words = f"{'a whole number' if self.is_whole else 'a number'} {'above' if self.is_above else 'from'}"
        upward = (
            ""
            if self.maximum == math.inf
            else f" {'and at most' if self.is_above else 'to'} {_in_digits(self.maximum)}"
        )
        also = "" if self.also is not None and math.isnan(self.also) else f", or {self.also}"
        return f"{words} {self.minimum:g}{upward or ' upwards'}{also}"

    def hold(self, value: Any) -> bool:
        """Whether a field may be ``value``, a number of Python or numpy, or None."""
        if value is None:
            return self.also is None
        is_number = is_whole(value) if self.is_whole else isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or value == self.also:
            return is_number
        return bool(self.minimum < value <= self.maximum if self.is_above else self.minimum <= value <= self.maximum)


def check_fields(kind: str, spec: Any, bounds: Mapping[str, Bounds], *, has_name: bool = True) -> None:
    """Hold numbers of a frozen dataclass against their bounds, and make those of numpy numbers of Python.

    Args:
        kind: what messages call it, before its name, such as "device".
        spec: the dataclass; called from its ``__post_init__``.
        bounds: by the field's name.
        has_name: whether its field ``name`` tells it from others.

    Raises:
        InputError: a field has no number within its bounds, or the name is no text; the message names the first such.
    """
    if has_name and not isinstance(spec.name, str):
        raise InputError(f"{kind}: name must be text, not {brief(spec.name)}")
    owner = f"{kind} {brief(spec.name)[1:-1]}" if has_name else kind
    for field, allowed in bounds.items():
        value = getattr(spec, field)
        if not allowed.hold(value):
            raise InputError(f"{owner}: {field} must be {allowed.in_words}, not {brief(value)}")
        if type(value) not in (int, float, type(None)):
            object.__setattr__(spec, field, int(value) if allowed.is_whole else float(value))


def _in_digits(number: float) -> str:
    """A bound as people write it: 65,536, but 1e+21."""
    return f"{number:,}" if isinstance(number, int) and number < 10**15 else f"{number:g}"
