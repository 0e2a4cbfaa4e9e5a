"""Replace the forward of a module while it is prepared; copies of the module keep the original."""

import copy
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from lengthwise.core.errors import InputError

Forward = Callable[..., Any]
Memo = dict[int, Any]
"""What :func:`copy.deepcopy` has copied so far."""
_NOT_TRACED = (
    "a prepared model is not traced: leave torch.compile out around it (or fullgraph=True), and let "
    "prepare(..., compile=True) compile its layers"
)
"""What torch says where compiled code calls a prepared model and may have no break for it."""


class PreparedForward:
    """A callable in place of a module's forward, until :meth:`release`.

    A deep copy or a pickle of the module has the forward that the module had before, so that averages of weights and
    reference models compute as plain models do.
    """

    is_prepared = True

    def __init__(self, module: nn.Module, answer: Forward, *, on_copy: Callable[[Memo], None] | None = None) -> None:
        """``answer`` is called instead; ``on_copy`` when the module is copied.

        Raises:
            InputError: the class of the module does not let its forward be replaced.
        """
        self.original: Forward = module.forward
        self._module, self._answer, self._on_copy = module, answer, on_copy
        self._was_own = "forward" in vars(module)
        self.__wrapped__ = self.original  # signatures are those of the original
        try:
            module.forward = self
        except AttributeError as error:
            raise InputError(
                f"the forward of {type(module).__name__} is a property, and it is replaced while the module is "
                "prepared: make it a method"
            ) from error

    @torch.compiler.disable(reason=_NOT_TRACED)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._answer(*args, **kwargs)

    def release(self) -> None:
        """Restore the module's own forward."""
        if self._was_own:
            self._module.forward = self.original
        else:
            vars(self._module).pop("forward", None)

    def __deepcopy__(self, memo: Memo) -> Forward:
        """Copy the original forward."""
        if self._on_copy is not None:
            self._on_copy(memo)
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the forward of the module's class."""
        return _forward_of_class, (self._module,)


def defined_forward(kind: type[nn.Module]) -> Any:
    """The forward of a class as it is defined, which may be a descriptor: that of scripted modules has no value of a
    class.
    """
    return getattr_static(kind, "forward")


def check_not_scripted(model: nn.Module) -> None:
    """Raise ``InputError`` if a module is scripted or traced: its weights and its calls are those of torch's own code,
    in which nothing can be replaced or followed.
    """
    name = type(model).__name__
    for key, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{f'{key} of {name}' if key else name} was made by torch.jit.script or torch.jit.trace, which keep "
                "weights and forward where they cannot be followed: put the module in that it was made of, and let "
                "prepare(..., compile=True) compile its layers"
            )


def _forward_of_class(module: nn.Module) -> Forward:
    forward: Forward = defined_forward(type(module)).__get__(module, type(module))
    return forward
