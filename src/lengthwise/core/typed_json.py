"""Make a dataclass from a JSON document: every field there, of exactly its annotated type, every number finite."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lengthwise.core.read_file import brief

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def from_document(kind: type[T], document: Any, where: str = "") -> T:
    """Build the dataclass ``kind`` from a JSON object; lists become tuples, objects the dataclasses they stand for.

    Raises:
        ValueError: a field is missing, unknown or of another type, or a number is not finite; the message names it.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{where or 'it'} must be an object, not {brief(document)}")
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    needed = {
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
    }
    prefix = f"{where}." if where else ""
    if missing := sorted(needed - document.keys()):
        raise ValueError(f"it has no {prefix}{missing[0]}")
    if unknown := sorted(document.keys() - names):
        raise ValueError(f"it has an unknown field {prefix}{brief(unknown[0])[1:-1]}")
    return kind(**{name: _converted(hints[name], value, prefix + name) for name, value in document.items()})


def _converted(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _first_that_takes(get_args(hint), value, where)
    if origin is tuple:
        return _as_tuple(get_args(hint), value, where)
    if is_dataclass(hint) and isinstance(hint, type):
        return from_document(hint, value, where)
    if origin in (dict, Mapping) or hint is Any:
        return value
    if hint is float and type(value) is int and abs(value) < 1 << 1000:
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise ValueError(f"{where} must be {_WORDS.get(hint, hint)}, not {brief(value)}")
    return value


def _as_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list:
        raise ValueError(f"{where} must be a list, not {brief(value)}")
    if kinds[-1] is Ellipsis:
        return tuple(_converted(kinds[0], item, f"{where}[{k}]") for k, item in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f"{where} must have {len(kinds)} items, not {len(value)}")
    return tuple(_converted(kind, item, f"{where}[{k}]") for k, (kind, item) in enumerate(zip(kinds, value)))


def _first_that_takes(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if isinstance(value, dict) and (objects := [kind for kind in kinds if is_dataclass(kind)]):
        return _converted(objects[0], value, where)  # whose error says what is wrong within it
    for kind in kinds:
        try:
            return _converted(kind, value, where)
        except ValueError:
            continue
    expected = " or ".join(_WORDS.get(kind, str(kind)) for kind in kinds)
    raise ValueError(f"{where} must be {expected}, not {brief(value)}")
