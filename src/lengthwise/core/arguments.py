"""Values of Python arguments held against their type hints, so that a wrong one is refused by name and not by a crash
deep inside, or taken for another number.
"""

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.wording import with_nearest

P = ParamSpec("P")
Result = TypeVar("Result")
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a name", Path: "a path"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "names"}


def check_arguments(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for the first value that is not what its hint says.

    Args:
        hints: types by name: int, float, bool, str, ``Path``, ``None``, literals, sequences of those, and unions of
            these; a name of another type, or of none, takes any value.
        values: by name. Numbers of numpy are numbers; True and False are none.
    """
    for name, value in values.items():
        if name in hints:
            _check(name, value, hints[name])


def arguments_checked(function: Callable[P, Result]) -> Callable[P, Result]:
    """Have a function hold its arguments against their type hints first, as :func:`check_arguments` does."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            arguments = signature(function).bind(*args, **kwargs).arguments
        except TypeError:  # the call says it in full
            arguments = {}
        check_arguments(get_type_hints(function), arguments)
        return function(*args, **kwargs)

    return checked


def _check(name: str, value: Any, hint: Any) -> None:
    kinds = _alternatives(hint)
    literals = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if any(_is_unknown(kind) for kind in kinds) or any(_is_of(value, kind) for kind in kinds):
        return
    if literals and isinstance(value, str):
        raise InputError(with_nearest(f"{name}={value!r} is not one of {', '.join(map(repr, literals))}", value))
    words = [_WORDS[kind] for kind in kinds if kind in _WORDS] + [repr(word) for word in literals]
    words += [f"a list of {_PLURALS.get(get_args(kind)[0], 'values')}" for kind in kinds if _is_sequence(kind)]
    also = ", or leave it out" if NoneType in kinds else ""
    raise InputError(f"{name}={brief(value)}: give {' or '.join(words)}{also}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) in (Sequence, Iterable)


def _is_unknown(kind: Any) -> bool:
    """Whether nothing is known of what this type takes."""
    if _is_sequence(kind):
        return any(map(_is_unknown, _alternatives(get_args(kind)[0])))
    return kind not in (*_WORDS, NoneType) and get_origin(kind) is not Literal


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type that is known."""
    if get_origin(kind) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(kind))
    if _is_sequence(kind):
        return _is_list(value) and all(_is_of(item, get_args(kind)[0]) for item in value)
    if kind is NoneType:
        return value is None
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return is_whole(value)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, os.PathLike if kind is Path else kind)


def _is_list(value: Any) -> bool:
    """Whether a value is a list, tuple or array, and no text."""
    return not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable) and hasattr(value, "__len__")


def is_whole(value: Any) -> bool:
    """Whether a value counts something: an integer of Python, numpy or torch."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def read_shapes(shapes: Any) -> list[tuple[int, int]]:
    """Shapes of batches, (rows, length) each.

    Raises:
        InputError: ``shapes`` holds something else, or is one shape alone.
    """
    pairs = list(shapes) if isinstance(shapes, Iterable) else [shapes]
    for pair in pairs:
        if not (_is_list(pair) and len(pair) == 2 and all(is_whole(size) and size > 0 for size in pair)):
            raise InputError(f"shapes has {brief(pair)}; give a list of (rows, length), two whole numbers from 1 each")
    return [(int(rows), int(length)) for rows, length in pairs]


def as_names(names: str | Sequence[str]) -> Sequence[str]:
    """One name or several."""
    return [names] if isinstance(names, str) else names
