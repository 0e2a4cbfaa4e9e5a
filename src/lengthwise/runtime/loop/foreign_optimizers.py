"""Refuse optimizers of the loop's own that step on weights which a run updates: they would be updated twice, or not.

Parameters of a prepared model hold this rank's part of a gradient, or none. The hook of torch that is called before a
step of any optimizer is there while the run is. An optimizer that prepare made of a user's function has the model's
parameters too, but steps on them within an update alone, when they are borrowed.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lengthwise.core.errors import InputError
from lengthwise.runtime.state.borrowed_parameters import is_borrowed


class ForeignOptimizers:
    """Refuses steps of other optimizers on the parameters of a run until it is closed."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        own: torch.optim.Optimizer | None,
        allowed: Callable[[], bool],
    ) -> None:
        """``own``: an optimizer that may step, on shards; ``allowed``: whether all optimizers may at the moment."""
        self._names = {id(parameter): name for name, parameter in parameters}
        self._own, self._allowed = own, allowed
        present = weakref.ref(self)
        self._handle: RemovableHandle = register_optimizer_step_pre_hook(lambda *called: _refuse(present, called[0]))
        weakref.finalize(self, self._handle.remove)

    def close(self) -> None:
        """Refuse nothing any more."""
        self._handle.remove()

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``InputError`` if ``optimizer`` would update a parameter of the run."""
        if optimizer is self._own or self._allowed():
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        name = next((self._names[id(x)] for x in parameters if id(x) in self._names and not is_borrowed(x)), None)
        if name is not None:
            kind = type(optimizer).__name__
            raise InputError(
                f"{kind}.step() would update {name}, which step.update() updates: gradients are summed over ranks and "
                f"clipped there. Leave {kind}.step() out; optimizer=, lr= and weight_decay= of prepare choose the "
                "optimizer, which may be a class of torch.optim"
            )


def _refuse(present: Callable[[], ForeignOptimizers | None], optimizer: Any) -> None:
    if (foreign := present()) is not None:
        foreign.refuse(optimizer)
