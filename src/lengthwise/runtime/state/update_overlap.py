"""Pushes and pulls of a third-party model's whole weights beneath its forwards and backwards.

In the last backward of a rank's step the gradients of a unit are pushed as soon as no position of the forward that is
still to come adds to them; where ranks keep shares of them, they are reduced as soon in every backward. A forward waits
for the weights that its next position uses. Positions are those of
:class:`lengthwise.runtime.wrap.layer_hooks.HookedLayers`. A gradient that comes after its unit was pushed or reduced,
such as of a loss that reads weights outside of the forward, is noticed, and then all ranks push again.
"""

import atexit
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.state.sharded import ShardedState


@dataclass(eq=False, kw_only=True)
class WatchedBackward:
    """A backward that is the last of a rank in its step, or whose gradients are reduced to shares."""

    is_last: bool
    group: Group | None
    """The ranks that reduce gradients to shares; None: each keeps its own until the step ends."""
    layers: range
    """That this rank computes."""
    unreached: Counter[int] = field(default_factory=Counter)
    """Outputs of each position of the forward whose gradients are not there yet."""


class UpdateOverlap:
    """Starts pushes in a step's last backward, and waits for weights position by position."""

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._used: Sequence[frozenset[int]] = ()
        self._first_final: list[int] = []
        """For each position, the first unit that neither it nor a position before it uses, nor any unit after it."""
        self.has_late_gradients = False
        """Whether a backward of this step added to gradients that had been pushed, or reduced to shares."""
        self._is_on = True
        self._pushes = False
        self._watched: WatchedBackward | None = None
        """The backward that runs."""
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
        self._first_final = [unit + 1 for unit in last_used]
        self._pushes = pushes_early and self._is_on

    def push_late(self) -> None:
        """Push all gradients again, as some came late on a rank, and from then on none early; every rank calls this."""
        self._is_on = False
        self._state.push_again()

    def reach_forward(self, position: int) -> None:
        """Wait for the weights that a position uses."""
        for unit in self._used[position] if self._used else ():
            if self._state.is_coming(unit):
                self._state.need(unit)

    def watch(self, watched: WatchedBackward | None, position: int, outputs: Any) -> None:
        """Push or reduce what is final when the gradients of a position's outputs are there; None: nothing is yet."""
        if watched is None:
            return
        for output in pytree.tree_iter(outputs):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                watched.unreached[position] += 1
                output.register_hook(partial(self._reached, watched, position))

    @contextmanager
    def backward(self, watched: WatchedBackward | None, position: int) -> Iterator[None]:
        """Within, the backward of a micro-batch runs, beginning at ``position``; ``watched``: as in :meth:`watch`."""
        self._watched = watched
        if watched is not None:
            self._begin_reduction(watched)
            self._push(position, is_last=watched.is_last)
        try:
            yield
        finally:
            self._watched = None

    def complete_layer(self, layer: int) -> None:
        """Push what is final after the gradients that the last backward of a rank's step left for later, down to those
        of ``layer``.
        """
        self._push(layer, is_last=True)

    def abandon_backward(self, watched: WatchedBackward | None) -> None:
        """Take part in reducing what is left of a micro-batch's gradients, without any, so that no rank waits."""
        if watched is not None and watched.group is not None:
            self._begin_reduction(watched)
            self._state.shares.abandon()

    def finish_backward(self, watched: WatchedBackward | None) -> None:
        """Reduce what is left of a micro-batch's gradients, and wait for it."""
        if watched is not None and watched.group is not None:
            self._state.shares.finish()

    def _begin_reduction(self, watched: WatchedBackward) -> None:
        """Begin to reduce the gradients of a micro-batch: of what the layers use that this rank computes."""
        if watched.group is None:
            return
        layers, num_layers = watched.layers, len(self._used) - 2
        first, end = layers.start + (layers.start > 0), layers.stop + 1 + (layers.stop == num_layers)
        self._state.shares.begin(watched.group, frozenset[int]().union(*self._used[first:end]))

    def _reached(self, watched: WatchedBackward, position: int, _: Tensor) -> None:
        if watched is self._watched:  # and not in a derivative that the loop takes before
            watched.unreached[position] -= 1
            if not watched.unreached[position]:
                self._push(position, is_last=watched.is_last)

    def _note_gradient(self, unit: int, _: Tensor) -> None:
        self.has_late_gradients |= self._state.is_pushed(unit) or self._state.shares.is_too_late(unit)

    def _push(self, position: int, *, is_last: bool) -> None:
        if self._first_final:
            self._state.complete(self._first_final[position], is_last=is_last and self._pushes)


def finish_at_exit(state: ShardedState) -> None:
    """Wait for the weights of the last update before a program ends, for others wait for this rank's share of them."""
    atexit.register(_finish_pull, weakref.ref(state))


def _finish_pull(state: Callable[[], ShardedState | None]) -> None:
    if (present := state()) is not None:
        with suppress(Exception):  # what ended the program has been said
            present.finish_pull()
