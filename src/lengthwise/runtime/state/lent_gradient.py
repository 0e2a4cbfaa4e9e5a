"""Gradients that are added up apart from their parameters, shown as ``parameter.grad`` while a loop may look at them.

Gradients of bfloat16 weights are summed in float32, and leave ``parameter.grad`` in the backward that makes them. To a
loop that reads, clips or clears them after it, ``parameter.grad`` is where they are summed, as of float32 weights, so
that a change is noticed. The class of a parameter has that property until the next pass, which computes with
ordinary parameters: autograd, which is not Python, never asks it.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

_loans: dict[int, "_Loan"] = {}
"""Where each shown parameter's gradient is, by its identity; not an attribute of it, which copies would have too."""


_GRADIENT = cast(Any, Tensor).grad
"""The property that tensors have."""


class LentGradient(nn.Parameter):
    """A parameter whose gradient is elsewhere, and read and written there."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient that was summed so far."""
        loan = _loans.get(id(self))
        return _GRADIENT.__get__(self) if loan is None else loan.read()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (loan := _loans.get(id(self))) is not None:
            loan.note_change()
        else:
            _GRADIENT.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


class LentGradients:
    """Shows the gradients of a model's parameters, and hides them again."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], read: Callable[[str], Tensor | None]) -> None:
        """``read``: the gradient of a parameter, by its name."""
        self._parameters, self._read = parameters, read
        self.changed = ""
        """A parameter whose gradient a loop set to another tensor or to None; an empty string: none."""

    def show(self) -> None:
        """Let ``grad`` of each parameter that is there be its gradient."""
        for name, parameter in self._parameters.items():
            if type(parameter) is nn.Parameter and parameter.numel():
                _loans[id(parameter)] = _Loan(self, name)
                parameter.__class__ = LentGradient

    def hide(self) -> None:
        """Let parameters be ordinary ones again."""
        for parameter in self._parameters.values():
            if type(parameter) is LentGradient:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                _loans.pop(id(parameter), None)


class _Loan:
    def __init__(self, lent: LentGradients, name: str) -> None:
        self._lent, self._name = lent, name

    def read(self) -> Tensor | None:
        return self._lent._read(self._name)

    def note_change(self) -> None:
        self._lent.changed = self._lent.changed or self._name
