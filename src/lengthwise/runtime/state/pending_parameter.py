"""Parameters whose values are on their way: whoever reads or computes with one waits for it first, unasked.

While its values come, a parameter is of a subclass of ``nn.Parameter`` whose ``__torch_function__`` waits and gives it
back its own class, as ``nn.UninitializedParameter`` becomes a parameter. What tells its form alone does not wait.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lengthwise.runtime.state.absent_parameter import FORM_FUNCTIONS, AbsentParameter
from lengthwise.runtime.state.table import ParameterTable

_arrivals: dict[int, Callable[[], None]] = {}
"""What waits for each pending parameter, by its identity; not an attribute of it, which copies would have as well."""


class PendingParameter(nn.Parameter):
    """A parameter whose values are on their way."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in FORM_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        wait_for(pytree.tree_iter((args, kwargs)))
        return func(*args, **kwargs)


def wait_for(values: Iterable[Any]) -> None:
    """Wait for the pending parameters among ``values``, as before code that torch does not tell of them."""
    for value in values:
        if isinstance(value, PendingParameter):
            _arrivals.get(id(value), lambda: None)()
            _settle(value)


class PendingUnits:
    """The parameters of some units as pending ones, from when their weights are on their way until they are there."""

    def __init__(self, named: Mapping[str, nn.Parameter], table: ParameterTable) -> None:
        self._parameters: dict[int, list[nn.Parameter]] = {}
        for name, parameter in named.items():
            self._parameters.setdefault(table.slots[name].unit, []).append(parameter)
        self._begun: set[int] = set()

    def begin(self, unit: int, arrive: Callable[[], None]) -> None:
        """Let whoever reads a parameter of ``unit`` call ``arrive`` first; now, if one is of a class of its own.

        What comes for other ranks alone nobody reads.
        """
        parameters = [p for p in self._parameters.get(unit, []) if not isinstance(p, AbsentParameter)]
        if any(type(parameter) is not nn.Parameter for parameter in parameters):
            arrive()
            return
        self._begun.add(unit)
        for parameter in parameters:
            _arrivals[id(parameter)] = arrive
            parameter.__class__ = PendingParameter

    def end(self, unit: int) -> None:
        """Let the parameters of ``unit`` be ordinary ones again."""
        if unit in self._begun:
            self._begun.remove(unit)
            for parameter in self._parameters[unit]:
                _settle(parameter)


def _settle(parameter: nn.Parameter) -> None:
    """Let a parameter be an ordinary one again: its values are there."""
    if type(parameter) is PendingParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        _arrivals.pop(id(parameter), None)
