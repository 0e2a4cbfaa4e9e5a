"""The gradients of a step as its loop sees them: shown between passes, and checked for changes by hand."""

import logging

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.state.absent_parameter import gradient_is_sent
from lengthwise.runtime.state.lent_gradient import LentGradients
from lengthwise.runtime.state.sharded import ShardedState

_log = logging.getLogger("lengthwise")


class LoopGradients:
    """What a loop may read of gradients between passes, and whether it changed any; of FSDP2's not even that."""

    def __init__(self, state: ShardedState | Fsdp2State) -> None:
        self._state = state if isinstance(state, ShardedState) else None
        self._fsdp2 = state if isinstance(state, Fsdp2State) else None
        self._lent = LentGradients({} if self._state is None else self._state.named, self._lend)
        self._version, self._has_any = 0, False
        self._has_warned, self._ended = False, (torch.empty(0), -1)
        """The gradients when the last step ended, and their version."""

    def end(self) -> None:
        """Note that a step has ended: what is added from now on is of no step."""
        if self._state is not None:
            self._ended = self._state.gradients, self._state.gradient_version

    def forget_left(self, step: int) -> None:
        """Forget gradients that a backward left before a step began, such as one in ``run.plain()``, and say so."""
        are_left = self._forget_left() if self._fsdp2 is None else self._fsdp2.forget_left()
        if are_left and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "step %d: gradients of a backward before it are no part of it, here and in later steps, and are "
                "cleared; end such a backward with model.zero_grad()", step,
            )  # fmt: skip

    def _forget_left(self) -> bool:
        """Forget them, and say whether they were there to be cleared: not of those that are added up elsewhere."""
        state = self._state
        assert state is not None, "the model is not FSDP2's"
        self.hide()
        names = list(state.named)
        gradients = {name: value for name, value in zip(names, state.gradients_of(names)) if value is not None}
        views = {} if state.has_gradients_elsewhere else state.gradient_views
        is_as_ended = self._ended[0] is state.gradients and self._ended[1] == state.gradient_version
        if is_as_ended and all(value is views.get(name) for name, value in gradients.items()):
            return False
        are_left = any(map(torch.any, gradients.values()))
        self._detached(state)
        state.discard_gradient()
        return are_left

    def begin(self) -> None:
        """Begin a step: until it has gradients, what ``zero_grad()`` does changes nothing."""
        self.hide()
        self._note(has_any=False)

    def release(self) -> None:
        """Let the loop have the gradients of a backward, as ``grad`` of parameters, until they are checked."""
        self._note(has_any=True)
        if self._state is not None and self._state.has_gradients_elsewhere:
            self._lent.show()

    def hide(self) -> None:
        """Let parameters be as passes compute with them."""
        self._lent.hide()

    def check(self) -> None:
        """Take gradients back; raise ``CheckError`` if they no longer land where they are summed, or were changed."""
        if problem := self.problem():
            raise CheckError(problem)

    def problem(self) -> str:
        """Take gradients back, and describe how they were changed by hand; an empty string if they were not."""
        self.hide()
        if (state := self._state) is None:
            return ""
        name = self._lent.changed or self._detached(state)
        if name:
            return (
                f"the gradient of {name} was taken away, by optimizer.zero_grad(), model.zero_grad() or "
                f"{name}.grad = ...; leave that out, step.update() begins anew"
            )
        if self._version != state.gradient_version and (self._has_any or state.gradients.any()):
            return (
                "gradients were changed between step.backward(loss) calls, by loss.backward(), clip_grad_norm_, "
                "scaler.unscale_, zero_grad() or by hand; leave that out: step.backward(loss) is the backward, and "
                "step.update() sums over ranks, clips by clip_norm= of prepare, and begins anew"
            )
        return ""

    def _note(self, *, has_any: bool) -> None:
        self._has_any, self._lent.changed = has_any, ""
        self._version = 0 if self._state is None else self._state.gradient_version

    def _detached(self, state: ShardedState) -> str:
        """Name of the first parameter whose gradient would not land where it is summed; all are put back there.

        Of gradients that were cleared before there was any, nothing is said.
        """
        names = [name for name, parameter in state.named.items() if parameter.numel()]
        views = {} if state.has_gradients_elsewhere else state.gradient_views
        detached = []
        for name, gradient in zip(names, state.gradients_of(names)):
            if gradient is not (view := views.get(name)):
                detached += [name] if self._has_any or gradient is not None else []
                state.named[name].grad = view
        return next(iter(detached), "")

    def _lend(self, name: str) -> Tensor:
        assert self._state is not None, "there are parameters"
        self._state.settle()
        if name not in self._state.gradient_views:
            raise InputError(
                gradient_is_sent(name, "gradients are sharded (shard_gradients)", "shard_gradients='none'")
            )
        return self._state.gradient_views[name]
