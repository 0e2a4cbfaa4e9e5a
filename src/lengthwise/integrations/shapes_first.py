"""The steps of an epoch with those first in which ranks meet shapes for the first time, so that compiling ends early.

The other way is to compile all shapes on made-up batches before the first step, which keeps the order of learning; here
no batch is made up, and the order depends on lengths and on the number of ranks: some of the steps come first.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from lengthwise.core.batch import BatchStream, GlobalBatch

Covers = Callable[[GlobalBatch], set[Hashable]]
"""What ranks meet in a step, such as (rank, shape)."""


def steps_to_move(covers: Sequence[set[Hashable]]) -> list[int]:
    """The steps that come first: each meets most of what none before it did, the earlier of equals, until all is met.

    Greedy set cover: at most ln(n) times as many as are needed for n things to meet.
    """
    missing, chosen = set[Hashable]().union(*covers), list[int]()
    while missing:
        best = max(range(len(covers)), key=lambda step: (len(covers[step] & missing), -step))
        chosen.append(best)
        missing -= covers[best]
    return chosen


class ShapesFirstStream:
    """The batches of a stream, epoch by epoch, each with the steps first that meet something new."""

    def __init__(self, make_stream: Callable[[], Any], covers: Covers) -> None:
        """``make_stream`` makes a :class:`~lengthwise.data.sampler.Sampler`; ``covers``: what a step meets."""
        self._stream, self._covers = make_stream(), covers
        self._batches: list[GlobalBatch] = []
        """Those of the epoch that is under way, in order; none at the beginning of one."""
        self._moved: list[int] | None = None
        """Steps that came first in the epoch under way, as a checkpoint has them."""
        self._begin, self._done, self._epoch = self._stream.state_dict(), 0, self._stream.epoch

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch is of."""
        return self._epoch

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> GlobalBatch:
        if not self._batches:
            self._read()
        batch = self._batches[self._done]
        self._done += 1
        if self._done == len(self._batches):
            self._batches, self._moved, self._done = [], None, 0
            self._begin, self._epoch = self._stream.state_dict(), self._stream.epoch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The stream at the beginning of the epoch, how many of its steps are done, and which came first."""
        if not self._done:
            return dict(self._begin)
        return {**self._begin, "steps_done": self._done, "moved": self._moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream that gave ``state`` was; on another number of ranks the epoch ends in its order.

        Raises:
            InputError: it is of other data.
        """
        begin = {name: value for name, value in state.items() if name not in ("steps_done", "moved")}
        self._stream.load_state_dict(begin)
        self._begin, self._epoch = self._stream.state_dict(), self._stream.epoch
        self._done, self._moved, self._batches = state.get("steps_done", 0), state.get("moved"), []
        if self._done:
            self._read()

    def _read(self) -> None:
        """Read the batches of an epoch, and put them into order."""
        batches = []
        while self._stream.epoch == self._epoch:
            batches.append(next(self._stream))
        if self._moved is None:
            self._moved = steps_to_move(list(map(self._covers, batches)))
        first = set(self._moved)
        order = [*self._moved, *(step for step in range(len(batches)) if step not in first)]
        numbers = [batch.step for batch in batches]
        self._batches = [replace(batches[step], step=number) for step, number in zip(order, numbers, strict=True)]
