"""Which sequences are learned from at which step: epoch after epoch, each sequence once, whatever the cluster."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.order import Everything, Order, Selection, Shuffled

_SCHEMA_VERSION = 2


class Sampler:
    """An endless iterator of global batches.

    With ``tokens_per_step``, a batch is the longest run of the epoch's order that stays within that many tokens; a
    sequence that is over it alone forms a batch alone. With ``sequences_per_step``, it is that many sequences.
    A batch never crosses the end of an epoch, so the last one of an epoch may be smaller. ``order`` is shuffled and
    ``selection`` every sequence where they are not given.
    """

    def __init__(
        self,
        lengths: LengthIndex,
        *,
        seed: int,
        tokens_per_step: int | None = None,
        sequences_per_step: int | None = None,
        order: Order | None = None,
        selection: Selection | None = None,
        objective: str = NEXT_TOKEN,
    ) -> None:
        budgets = {"data.tokens_per_step": tokens_per_step, "data.sequences_per_step": sequences_per_step}
        given = {name: budget for name, budget in budgets.items() if budget is not None}
        if len(given) != 1:
            raise InputError(f"set exactly one of {' and '.join(budgets)}; {len(given)} of them are set")
        for name, budget in given.items():
            if budget < 1:
                raise InputError(f"{name} is {budget}; at least 1 is needed")
        if not 0 <= seed < 1 << 64:
            raise InputError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
        self._lengths, self._objective, self._seed = lengths, objective, seed
        self._order_of, self._selection = order or Shuffled(), selection or Everything(len(lengths))
        self._identity: dict[str, Any] = {
            "digest": lengths.digest,
            "seed": seed,
            "tokens_per_step": tokens_per_step,
            "sequences_per_step": sequences_per_step,
            "order": self._order_of.to_json(),
            "selection": self._selection.to_json(),
        }
        self._tokens_per_step = tokens_per_step
        self._sequences_per_step = sequences_per_step
        self._rewind(epoch=0, position=0, step=0)

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        ids = self._order[self._position : self._end()]
        batch = GlobalBatch(
            step=self._step,
            ids=tuple(ids.tolist()),
            lengths=tuple(self._lengths.lengths[ids].tolist()),
            objective=self._objective,
        )
        self._advance()
        return batch

    @property
    def step(self) -> int:
        """Number of the next batch, counted from 0 over all epochs."""
        return self._step

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Sequences of the epoch that earlier batches hold."""
        return self._position

    def skip_to(self, step: int) -> None:
        """Make ``step`` the next batch, forwards or backwards; one search per step passed over."""
        if step < 0:
            raise InputError(f"cannot skip to step {step}; steps count from 0")
        if step < self._step:
            self._rewind(epoch=0, position=0, step=0)
        while self._step < step:
            self._advance()

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is and what it samples, in plain values."""
        place = {"epoch": self._epoch, "position": self._position, "step": self._step}
        return {"schema_version": _SCHEMA_VERSION, **self._identity, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the sampler that gave ``state`` was.

        Raises:
            InputError: the state is of another corpus, seed, budget or version; every difference is named.
        """
        expected = {"schema_version": _SCHEMA_VERSION, **self._identity}
        wrong = [
            f"{name}: {state.get(name)!r} in the state, {value!r} here"
            for name, value in expected.items()
            if state.get(name) != value
        ]
        if wrong:
            raise InputError(
                f"the sampler's state is of another run ({'; '.join(wrong)}); resume with its own settings"
            )
        place = [state.get(name) for name in ("epoch", "position", "step")]
        whole = all(isinstance(value, int) and value >= 0 for value in place)
        if not whole or state["position"] >= len(self._selection.ids(state["epoch"])):
            raise InputError(
                f"the sampler's state is damaged: epoch, position and step are {place}; resume from another"
            )
        self._rewind(epoch=state["epoch"], position=state["position"], step=state["step"])

    def _rewind(self, *, epoch: int, position: int, step: int) -> None:
        self._epoch, self._position, self._step = epoch, position, step
        self._order = self._order_of.arrange(self._selection.ids(epoch), seed=self._seed, epoch=epoch)
        self._tokens_before = np.concatenate([[0], np.cumsum(self._lengths.lengths[self._order], dtype=np.int64)])

    def _end(self) -> int:
        """Where the batch that starts at the position ends, in the epoch's order."""
        if self._sequences_per_step is not None:
            return min(self._position + self._sequences_per_step, len(self._order))
        assert self._tokens_per_step is not None
        limit = self._tokens_before[self._position] + self._tokens_per_step
        end = int(np.searchsorted(self._tokens_before, limit, side="right")) - 1
        return max(end, self._position + 1)

    def _advance(self) -> None:
        end = self._end()
        if end == len(self._order):
            self._rewind(epoch=self._epoch + 1, position=0, step=self._step + 1)
        else:
            self._position, self._step = end, self._step + 1
