"""Check that what a model computes of a sequence does not depend on which sequences it was called with before."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import varied
from lengthwise.runtime.verify.precision import Tolerance, compare_precisely
from lengthwise.runtime.verify.stock_call import stock_output
from lengthwise.runtime.verify.verdict import on_every_rank
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls, StateError

MOST_SLOTS = 1 << 15
"""Slots of the longest sequence that is computed where a word has changed, as when attention is another one."""


class StateWatch:
    """Notes, while a model is compared, whether its forwards leave anything behind in it."""

    def __init__(self) -> None:
        self.has_changed = self.has_other_words = False
        self.names: set[str] = set()
        """Attributes that they have changed."""

    def note(self, state: StateBetweenCalls) -> None:
        """Note what has changed since ``state``."""
        changes = state.changes()
        self.has_changed = self.has_changed or bool(changes)
        self.names |= state.names()
        self.has_other_words = self.has_other_words or state.are_words(changes)

    def check(self, run: PreparedModel, slots: tuple[int, int, int]) -> None:
        """Compare losses of single sequences that are called in two orders, if forwards leave anything behind.

        The model is told what they leave.
        Every rank calls this. ``slots``: of the shortest and the longest sequence that were compared, and of the
        longest there is.

        Raises:
            StateError: they differ.
        """
        run.wrapped_model.own_state |= self.names
        lengths, results = self._lengths(run, *slots), list[tuple[float, list[float], str]]()

        def compute(order: Sequence[int], tolerance: Tolerance, fill: object) -> None:
            del fill
            results.append((tolerance.relative, *_losses_in_order(run, lengths, order)))

        numbers = range(len(lengths))
        for order in (numbers, numbers[::-1]) if lengths else ():
            compare_precisely(run, partial(compute, order))
        if not results:
            return
        (relative, first, reason), (_, second, _) = results[0], results[-1]
        for loss, other in zip(first, second):
            if loss == loss and abs(loss - other) > relative * max(abs(loss), abs(other)):
                raise StateError(reason)

    def _lengths(self, run: PreparedModel, shortest: int, compared: int, longest: int) -> tuple[int, ...]:
        """Slots of the sequences that are called; () if forwards leave nothing behind on any rank."""
        rows = torch.tensor([self.has_changed, self.has_other_words], dtype=torch.int64, device=run.world.device)
        has_changed, has_other_words = gather_rows(rows).amax(dim=0).tolist()
        last = max(compared, min(longest, MOST_SLOTS)) if has_other_words else compared
        lengths = tuple(sorted(run.collator.compared_lengths)) or (shortest, (shortest + last) // 2, last)
        return tuple(dict.fromkeys(lengths)) if has_changed else ()


def _losses_in_order(run: PreparedModel, lengths: tuple[int, ...], order: Sequence[int]) -> tuple[list[float], str]:
    """The losses of single sequences of ``lengths`` slots, called in ``order``; and why they may depend on it."""
    state, losses = StateBetweenCalls(run.model), [0.0] * len(lengths)
    with varied(run, lengths), torch.no_grad():
        for sequence in order:
            what = f"one of {lengths[sequence]:,} slots"
            losses[sequence] = on_every_rank(run, _loss_of(run, lengths, sequence), what, is_stock=True)
    return losses, state.described("it was called with sequences of other lengths before")


def _loss_of(run: PreparedModel, lengths: tuple[int, ...], sequence: int) -> Callable[[], float]:
    """A function of the loss of a sequence by itself, with its own random numbers."""

    def loss() -> float:
        with run.gathered(), torch.random.fork_rng([run.world.device] if run.world.device.type == "cuda" else []):
            torch.manual_seed(sequence)
            output, micro_batch = stock_output(run, lengths, sequence)
            with active(micro_batch.shard):
                return float(run.wrapped_model.loss_of(output, micro_batch))

    return loss
