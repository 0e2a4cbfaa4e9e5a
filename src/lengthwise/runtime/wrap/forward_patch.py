"""Replace the forward of a module while it is prepared; copies of the module keep the original."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

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
        """``answer`` is called instead; ``on_copy`` when the module is copied."""
        self.original: Forward = module.forward
        self._module, self._answer, self._on_copy = module, answer, on_copy
        self._was_own = "forward" in vars(module)
        self.__wrapped__ = self.original  # signatures are those of the original
        module.forward = self

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


def _forward_of_class(module: nn.Module) -> Forward:
    return MethodType(type(module).forward, module)
