"""Say what a model keeps between calls, whose forward then may give something else for the same inputs.

Such as a counter in Python, or the word by which BigBird is in full attention for good from its first short sequence
on. Most of what a forward keeps does no harm (tables of positions, the shape that was last seen), so what changed only
says where to look: results decide.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.own_generators import generator_states

FEW_NUMBERS = 1 << 12
"""A larger tensor is no counter and no running mean; a larger container is known by its length."""
DEPTH = 3
"""Containers and objects within one another that are looked into."""

WORDS = (str, bytes, bool, int, float, complex, Enum, type, torch.dtype, np.generic, type(None))
_MACHINERY = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"})
"""What every module has, such as hooks: no state of its user's."""

_SWITCHED = "_attn_implementation_internal"
"""What a prepared model of transformers has another one of."""

Values = dict[str, Any]
"""What attributes have, by name: words and numbers, and else what tells that something was exchanged or written."""


class StateError(CheckError):
    """What a forward gives depends on the calls before it.

    ``is_named``: whether the message says which attribute of the model has changed.
    """

    def __init__(self, message: str, *, is_named: bool = True) -> None:
        super().__init__(message)
        self.is_named = is_named


class StateBetweenCalls:
    """The attributes of a model's modules and of their configs, before it is called."""

    def __init__(self, model: nn.Module, *, saved_buffers: bool = True) -> None:
        """``saved_buffers``: whether buffers count that are saved with the model; False: others look at them."""
        self._model, self._saved_buffers = model, saved_buffers
        self._before, self._generators = values_of(model, saved_buffers), generator_states(model)

    def changes(self) -> list[tuple[str, Any]]:
        """The attributes that forwards have changed since, and what they have now, words and modules first."""
        now, before = values_of(self._model, self._saved_buffers), self._before
        names = [name for name in now if name not in before or not is_same(before[name], now[name])]
        return [(name, now[name]) for name in sorted(names, key=lambda name: _rank(before.get(name), now[name]))]

    def names(self) -> set[str]:
        """The attributes that forwards have changed since, made or removed."""
        now = values_of(self._model, self._saved_buffers)
        return {name for name, _ in self.changes()} | (self._before.keys() - now.keys())

    def are_words(self, changes: list[tuple[str, Any]]) -> bool:
        """Whether a word, a flag, a class or a module is among ``changes``, by which forwards may be another thing."""
        return any(_rank(self._before.get(name), value) == 0 for name, value in changes[:1])

    def error(self) -> StateError:
        """Why a forward gives something else where it is called again with the same inputs."""
        return StateError(self.described(), is_named=bool(self._drawn() or self.changes()))

    def _drawn(self) -> str:
        """The generator of the model's own that was drawn from since; an empty string: none was."""
        before = self._generators
        return next((name for name, state in generator_states(self._model).items() if before.get(name) != state), "")

    def described(self, again: str = "it is called again with the same inputs") -> str:
        """Why results of the same inputs differ, in words, with the first attribute that has changed since.

        ``again``: when they differ.
        """
        differs = f"The forward of {type(self._model).__name__} gives something else when {again}: it "
        if drawn := self._drawn():
            return (
                f"{differs}draws from {drawn}, a random generator of its own, whose numbers would differ between ranks "
                "and depend on how sequences are packed; leave the generator out, as dropout, torch.randn_like and "
                "torch.rand_like do"
            )
        first, way_out = "", "set it in the loop, once for each step, and leave it as it is in the forward"
        for name, value in self.changes()[:1]:
            first = f", such as its attribute {name}"
            leaf = name.rpartition(".")[2]
            if isinstance(value, str):
                first += f", which became {value!r}"
                if isinstance(getattr(getattr(self._model, "config", None), leaf, None), str):
                    way_out = f"make the model with config.{leaf}={value!r}, which it then keeps"
        return (
            f"{differs}keeps state between calls{first}, which would differ between ranks and depend on how sequences "
            f"are packed; {way_out}"
        )


def values_of(model: nn.Module, saved_buffers: bool = True) -> Values:
    """What the attributes of a model's modules and of their configs have, by name, and its buffers; see above."""
    values, seen = Values(), set[int]()
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        values[f"{path}__class__"] = type(module)
        for name, child in module._modules.items():
            values[f"{path}{name} (the module)"] = _Thing(child)
        unsaved = module._non_persistent_buffers_set
        for name, buffer in (
            module._buffers.items() if saved_buffers else zip(unsaved, map(module._buffers.get, unsaved))
        ):
            values |= _leaves(f"{path}{name}", buffer, seen)
        for name, value in vars(module).items():
            if name in _MACHINERY:
                continue
            if isinstance(value, WORDS):  # most are: this is read before every step
                values[f"{path}{name}"] = value
            else:
                values |= _leaves(f"{path}{name}", value, seen)
    return values


def leaves_of(name: str, value: Any) -> Values:
    """What an attribute has, by name."""
    return _leaves(name, value, set())


def _leaves(name: str, value: Any, seen: set[int], depth: int = 0) -> Values:
    """An attribute, or what is in it, by name; ``seen``: objects that were looked into, such as a config.

    What cannot be read is known by being the same object: a sparse tensor, one of inference mode, an odd property.
    """
    try:
        return _read(name, value, seen, depth)
    except Exception:  # whatever other people's classes raise
        return {name: _Thing(value)}


def _read(name: str, value: Any, seen: set[int], depth: int) -> Values:
    if isinstance(value, WORDS):
        return {name: value}
    if isinstance(value, Tensor):
        return {name: _Numbers.of(value)}
    if isinstance(value, RemovableHandle):
        return {}
    if isinstance(value, np.ndarray) and value.size <= FEW_NUMBERS:
        return {name: (value.shape, value.tobytes())}
    if isinstance(value, set | frozenset):
        return {name: frozenset(value) if len(value) <= FEW_NUMBERS else len(value)}
    if id(value) in seen:
        return {}
    if depth >= DEPTH or isinstance(value, nn.Module | ModuleType) or callable(value):
        return {name: _Thing(value)}
    seen.add(id(value))
    if isinstance(value, dict | list | tuple | deque) and len(value) > FEW_NUMBERS:
        return {name: _Thing(value), f"{name} (its length)": len(value)}
    leaves: Values = {}
    for part, inner in _parts(value):
        leaves |= _leaves(f"{name}{part}", inner, seen, depth + 1)
        if len(leaves) > FEW_NUMBERS:
            return {name: _Thing(value)}
    return leaves


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object has, by what is written after its name."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
    else:
        yield from ((f".{key}", inner) for key, inner in getattr(value, "__dict__", {}).items() if key != _SWITCHED)


class _Thing:
    """Something that is known by being the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Thing) and (self.value is other.value or _is_method_of_same(self.value, other.value))

    __hash__ = None  # type: ignore[assignment]


class _Numbers(_Thing):
    """A tensor, known by its numbers where it is small, and else by its writes."""

    @classmethod
    def of(cls, value: Tensor) -> "_Numbers":
        """The numbers of a tensor as it is now."""
        is_small = value.numel() <= FEW_NUMBERS and not value.is_meta and value.device.type == "cpu"
        return cls(value, value.detach().tolist() if is_small else None)

    def __init__(self, value: Tensor, numbers: Any) -> None:
        super().__init__(ref(value))  # which may have a graph
        self._version, self._numbers = value._version, numbers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Numbers):
            return False
        if self._numbers is not None and other._numbers is not None:
            return bool(self._numbers == other._numbers)
        is_same_tensor = self.value() is not None and self.value() is other.value()
        return is_same_tensor and self._version == other._version

    __hash__ = None


def _is_method_of_same(value: Any, other: Any) -> bool:
    """Whether both are a method of the same object, which is another object whenever it is read."""
    function = getattr(value, "__func__", None)
    is_same_function = function is not None and function is getattr(other, "__func__", None)
    return is_same_function and value.__self__ is getattr(other, "__self__", None)


def is_same(value: Any, other: Any) -> bool:
    """Whether an attribute has not changed."""
    if isinstance(value, float) and isinstance(other, float) and value != value and other != other:
        return True
    return type(value) is type(other) and bool(value == other)


def _rank(before: Any, now: Any) -> int:
    """How likely a change makes a difference: words and modules, then numbers, then tensors and what is made late."""
    if isinstance(now, _Numbers):
        return 2
    if isinstance(now, int | float | complex) and not isinstance(now, bool | Enum):
        return 1
    if before is None and not isinstance(now, str | bool):
        return 2
    return 0
