"""Methods of a user's optimizer that change weights outside of its steps, such as ``eval()`` of schedule-free ones.

An optimizer has state of the parameters that its rank updates alone, so such a method changes those. ``eval()`` and
``train()`` get master weights, as steps do, and all ranks the weights that follow. Others that change weights are
refused where ranks share the update.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import RankOperation
from lengthwise.runtime.state.borrowed_parameters import is_borrowed
from lengthwise.runtime.state.layer_gather import LayerGather
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

MODES = ("eval", "train")
"""Methods that may change weights; every rank calls them."""


class TrainedModel(Protocol):
    """A run, as far as methods of its optimizer change its weights."""

    wrapped_model: WrappedModel
    world: DistContext

    @property
    def is_closed(self) -> bool:
        """Whether the model was given back."""
        ...

    @property
    def gather(self) -> LayerGather | None:
        """Gathers the weights of one layer at a time; None: every rank holds all of them."""
        ...

    def keep_changes(self, operation: RankOperation, call: str) -> None:
        """Adopt changes that loops made to weights, where every rank makes the same ``call`` between two steps."""
        ...


class OptimizerMethods:
    """Watches the methods of the optimizer that a user's function made."""

    def __init__(self, run: TrainedModel, state: ShardedState, check_between_steps: Callable[[str], None]) -> None:
        """``check_between_steps`` raises ``CheckError`` if a step is being computed; it takes the call for its text."""
        self._run, self._state, self._check_between_steps = run, state, check_between_steps
        optimizer = state.optimizer
        if state.settings.make is None or optimizer is None:
            return
        for name in own_methods(optimizer):
            method, call = getattr(optimizer, name), f"{type(optimizer).__name__}.{name}()"
            watched = self._change_mode if name in MODES else self._watch
            setattr(optimizer, name, partial(watched, method, call))

    def _change_mode(self, method: Callable[..., Any], call: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``eval()`` or ``train()`` with master weights, and bring every rank the weights that follow.

        Raises:
            CheckError: a step is being computed, or ranks call different things or changed weights differently.
            InputError: the run is closed.
        """
        if self._is_stepping:
            return method(*args, **kwargs)
        if self._run.is_closed:
            self._check_after_close(call)
            return method(*args, **kwargs)
        self._check_between_steps(call)
        if self._run.gather is not None and self._run.gather.is_begun:
            raise CheckError(f"{call} within a step: ranks have its weights; call it after step.update()")
        self._run.keep_changes(RankOperation.MODE, call)
        if self._run.gather is not None and self._run.wrapped_model.is_plain:
            self._state.local_weights().adopt()
        with self._state.owned.lent_to_optimizer():
            result = method(*args, **kwargs)
        self._state.forget_weights()
        if self._run.gather is None or self._run.wrapped_model.is_plain:
            self._state.pull()
            self._state.finish_pull()
        return result

    def _watch(self, method: Callable[..., Any], call: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and raise ``InputError`` if it changes weights of which other ranks have others."""
        if self._is_stepping or self._run.world.size == 1:
            return method(*args, **kwargs)
        before = self._versions()
        result = method(*args, **kwargs)
        if self._versions() != before:
            raise InputError(
                f"{call} changes weights outside of step(): each of the {self._run.world.size} ranks has the "
                "optimizer's state of the parameters that it updates, and would change these alone. Name what changes "
                "weights eval() or train(), which every rank calls between two steps and which are right on any number "
                "of ranks; or train on 1 rank"
            )
        return result

    @property
    def _is_stepping(self) -> bool:
        return any(is_borrowed(segment.parameter) for segment in self._state.owned.all[:1])

    def _versions(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that are not here, too
            return sum(parameter._version for parameter in self._state.named.values())

    def _check_after_close(self, call: str) -> None:
        is_alone = self._run.world.size == 1
        if is_alone and self._state.coarsest_dtype == self._state.master_dtype:
            return
        reason = (
            f"the optimizer has weights in {self._state.master_dtype}, and the model in {self._state.coarsest_dtype}"
            if is_alone
            else "each rank's optimizer has the state of the parameters that it updated, and would change these alone"
        )
        raise InputError(f"{call} after run.close(): {reason}; call it on every rank before run.close()")


def own_methods(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of public methods that a class has beyond those of optimizers of torch."""
    kind = type(optimizer)
    names = [name for name in dir(kind) if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)]
    return [name for name in names if inspect.isfunction(inspect.getattr_static(kind, name))]
