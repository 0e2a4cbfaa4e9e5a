"""Pushes and pulls of a third-party model's whole weights beneath its forwards and backwards.

In the last backward of a rank's step the gradients of a unit are pushed as soon as no position of the forward that is
still to come adds to them; a forward waits for the weights that its next position uses. Positions are those of
:class:`lengthwise.runtime.wrap.layer_hooks.HookedLayers`. A gradient that comes after its unit was pushed, such as of a
loss that reads weights outside of the forward, is noticed, and then all ranks push again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.runtime.state.sharded import ShardedState


class UpdateOverlap:
    """Starts pushes in a step's last backward, and waits for weights position by position."""

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._used: Sequence[frozenset[int]] = ()
        self._first_final: list[int] = []
        """For each position, the first unit that neither it nor a position before it uses, nor any unit after it."""
        self.has_late_gradients = False
        """Whether a backward of this step added to gradients that had been pushed."""
        self._is_on = True
        self._unreached: Counter[int] | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, state.table.slots[name].unit))
            for name, parameter in state.named.items()
        ]

    def close(self) -> None:
        """Push and wait no more within passes."""
        self._used, self._first_final = (), []
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, used: Sequence[frozenset[int]], *, pushes_early: bool) -> None:
        """Begin a step, in which each position of the forward has the parameters of the units ``used`` there.

        ``pushes_early``: whether its gradients are those that the state pushes.
        """
        self._used, self.has_late_gradients = used, False
        last_used = accumulate((max(units, default=-1) for units in self._used), max)
        self._first_final = [unit + 1 for unit in last_used] if pushes_early and self._is_on else []

    def push_late(self) -> None:
        """Push all gradients again, as some came late on a rank, and from then on none early; every rank calls this."""
        self._is_on = False
        self._state.push_again()

    def reach_forward(self, position: int) -> None:
        """Wait for the weights that a position uses."""
        for unit in self._used[position] if self._used else ():
            if self._state.is_coming(unit):
                self._state.need(unit)

    def watch(self, unreached: Counter[int] | None, position: int, outputs: Any) -> None:
        """Push what is final when the gradients of a position's outputs are there.

        ``unreached``: outputs of each position whose gradients are not there yet, of the micro-batch whose backward is
        the last; None: it is another.
        """
        if unreached is None or not self._first_final:
            return
        for output in pytree.tree_iter(outputs):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                unreached[position] += 1
                output.register_hook(partial(self._reached, unreached, position))

    @contextmanager
    def backward(self, unreached: Counter[int] | None, position: int) -> Iterator[None]:
        """Within, the backward of a micro-batch runs, beginning at ``position``; ``unreached``: as in :meth:`watch`."""
        self._unreached = unreached
        if unreached is not None:
            self._push(position)
        try:
            yield
        finally:
            self._unreached = None

    def _reached(self, unreached: Counter[int], position: int, _: Tensor) -> None:
        if unreached is self._unreached:  # and not in a derivative that the loop takes before
            unreached[position] -= 1
            if not unreached[position]:
                self._push(position)

    def _note_gradient(self, unit: int, _: Tensor) -> None:
        self.has_late_gradients |= self._state.is_pushed(unit)

    def _push(self, position: int) -> None:
        if self._first_final:
            self._state.push_from(self._first_final[position])
