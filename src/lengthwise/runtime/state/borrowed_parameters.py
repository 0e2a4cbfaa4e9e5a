"""Parameters of a model in the hands of an optimizer of the user's: the same objects, for a while with other values.

An optimizer may tell parameters apart by their identity, or by attributes that a user sets on them, when it is made and
in each step. It is therefore made of the model's own parameters. While it is made and steps, those that a rank updates
have its master weights as their values, and summed gradients; then they are again what the model computes with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.state.lent_gradient import LentGradient
from lengthwise.runtime.state.pending_parameter import PendingParameter

_PASSING = (AbsentParameter, LentGradient, PendingParameter)
"""Classes that parameters have for a while."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_borrowed: set[int] = set()
"""Identities of the parameters that have other values now."""


def is_borrowed(parameter: Any) -> bool:
    """Whether an optimizer has a parameter with other values now."""
    return id(parameter) in _borrowed


@contextmanager
def borrowed(parameters: Sequence[nn.Parameter], values: Sequence[Tensor | None]) -> Iterator[None]:
    """Within, parameters have other ``values``, of any shape, dtype and device, and no gradient.

    None of ``values``: the parameter keeps its own.
    """
    before: list[tuple[nn.Parameter, type, Tensor, Tensor | None]] = []
    try:
        for parameter, value in zip(parameters, values, strict=True):
            kind = type(parameter)
            parameter.__class__ = _lasting_class(kind)
            before.append((parameter, kind, parameter.data, parameter.grad))
            parameter.grad = None
            if value is not None:
                parameter.data = value
            _borrowed.add(id(parameter))
        yield
    finally:
        for parameter, kind, data, gradient in before:
            _borrowed.discard(id(parameter))
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
            parameter.__class__ = kind


def _lasting_class(kind: type) -> type:
    """The class that a parameter has between times."""
    while issubclass(kind, _PASSING):
        kind = kind.__bases__[-1]
    return kind


@contextmanager
def as_they_were(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, attributes may be set on parameters, and hooks be registered, which are gone afterwards."""
    before = [(dict(vars(parameter)), _hooks_of(parameter)) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, (attributes, hooks) in zip(parameters, before):
            vars(parameter).clear()
            vars(parameter).update(attributes)
            for name, key in _hooks_of(parameter) - hooks:
                del getattr(parameter, name)[key]


def num_hooks(parameters: Sequence[nn.Parameter]) -> int:
    """The number of hooks that are registered on gradients of parameters."""
    return sum(len(_hooks_of(parameter)) for parameter in parameters)


def _hooks_of(parameter: nn.Parameter) -> set[tuple[str, int]]:
    """The hooks on a parameter's gradient, by the name of the dictionary and the key in it."""
    return {(name, key) for name in _HOOKS for key in getattr(parameter, name, None) or ()}
