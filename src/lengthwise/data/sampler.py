"""Which sequences are learned from at which step: epoch after epoch, each sequence once, whatever the cluster."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.batch_budget import Budget
from lengthwise.data.order import EverySequence, Order, OrderOfBatches, Selection, Shuffled
from lengthwise.data.rng import BATCHES, epoch_order

_SCHEMA_VERSION = 2
_PLACE = ("epoch", "position", "step")
_SETTINGS = {
    "tokens_per_step": Setting.TOKENS_PER_STEP,
    "sequences_per_step": Setting.SEQUENCES_PER_STEP,
    "order.name": Setting.ORDER,
}
"""What of a sampler's identity is a setting of its own."""


class OtherBatchesError(InputError):
    """A state of a sampler of other sequences, or of another order of them."""


def batch_of(lengths: LengthIndex, ids: np.ndarray, *, step: int, objective: str) -> GlobalBatch:
    """The global batch of the sequences of these ``ids``, with what is known of their lengths."""
    targets, attention_lengths = lengths.targets, lengths.attention_lengths
    return GlobalBatch(
        step=step,
        ids=tuple(ids.tolist()),
        lengths=tuple(lengths.lengths[ids].tolist()),
        objective=objective,
        targets=None if targets is None else tuple(targets[ids].tolist()),
        attention_lengths=None if attention_lengths is None else tuple(attention_lengths[ids].tolist()),
    )


class Sampler:
    """An endless iterator of global batches.

    With ``tokens_per_step``, a batch is the longest run of the epoch's order that stays within that many tokens; a
    sequence that is over it alone forms a batch alone. With ``sequences_per_step``, it is that many sequences. A
    ``budget`` says it in full: padding counted, least and most sequences. A batch never crosses the end of an epoch, so
    the last one of an epoch may be smaller. ``order`` is shuffled and ``selection`` every sequence where they are not
    given.
    """

    def __init__(
        self,
        lengths: LengthIndex,
        *,
        seed: int,
        tokens_per_step: int | None = None,
        sequences_per_step: int | None = None,
        budget: Budget | None = None,
        order: Order | None = None,
        selection: Selection | None = None,
        objective: str = NEXT_TOKEN,
    ) -> None:
        if not 0 <= seed < 1 << 64:
            raise InputError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
        self._budget = budget or _one_of(tokens_per_step, sequences_per_step)
        if budget is not None and (tokens_per_step or sequences_per_step):
            raise InputError(
                f"a budget is given, and {Setting.TOKENS_PER_STEP} or {Setting.SEQUENCES_PER_STEP} too; give one"
            )
        self._lengths, self._objective, self._seed = lengths, objective, seed
        self._order_of, self._selection = order or Shuffled(), selection or EverySequence(len(lengths))
        self._identity: dict[str, Any] = {
            "digest": lengths.digest,
            "seed": seed,
            "tokens_per_step": tokens_per_step,
            "sequences_per_step": sequences_per_step,
            **({} if budget is None else {"budget": budget.to_json()}),
            "order": self._order_of.to_json(),
            "selection": self._selection.to_json(),
        }
        self._arranged = -1  # no epoch yet: making a sampler costs nothing
        self._epoch = self._position = self._step = self._number = 0

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        self._arrange_epoch()
        ids = self._ids[self._position : self._ends[self._number]]
        batch = batch_of(self._lengths, ids, step=self._step, objective=self._objective)
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

    @property
    def dealt(self) -> np.ndarray:
        """Ids of the epoch that earlier batches hold, in its order."""
        self._arrange_epoch()
        return self._ids[: self._position]

    def num_batches(self, epochs: int) -> int:
        """Number of batches of the first ``epochs`` epochs."""
        return sum(len(self.arrange(epoch)[1]) for epoch in range(epochs))

    def skip_to(self, step: int) -> None:
        """Make ``step`` the next batch, forwards or backwards; every epoch passed over is arranged."""
        if step < 0:
            raise InputError(f"cannot skip to step {step}; steps count from 0")
        if step < self._step:
            self._rewind(epoch=0, position=0, step=0)
        self._arrange_epoch()
        while (left := len(self._ends) - self._number) <= step - self._step:
            self._rewind(epoch=self._epoch + 1, position=0, step=self._step + left)
        self._rewind(
            epoch=self._epoch,
            position=int(self._starts[self._number + step - self._step]),
            step=step,
        )

    def arrange(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of an epoch in its order, and where each of its batches ends."""
        ids = self._order_of.arrange(self._selection.ids(epoch), seed=self._seed, epoch=epoch)
        order, breaks = self._order_of, None
        if isinstance(order, OrderOfBatches):
            breaks = order.breaks(len(ids), epoch=epoch)
        ends = self._budget.cut(self._lengths.lengths[ids], breaks=breaks).ends
        if breaks is None:
            return ids, ends
        sizes = np.diff(ends, prepend=0)
        turn = epoch_order(len(ends), seed=self._seed, epoch=epoch, number=BATCHES)
        sizes, starts = sizes[turn], (ends - sizes)[turn]
        ends = np.cumsum(sizes)
        return ids[np.repeat(starts - (ends - sizes), sizes) + np.arange(len(ids))], ends

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is and what it samples, in plain values."""
        place = (self._epoch, self._position, self._step)
        return {"schema_version": _SCHEMA_VERSION, **self._identity, **dict(zip(_PLACE, place))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the sampler that gave ``state`` was.

        Raises:
            OtherBatchesError: the state is of another corpus, seed, budget or version; every difference is named.
            InputError: it is damaged.
        """
        expected = _flat({"schema_version": _SCHEMA_VERSION, **self._identity})
        saved = _flat({name: value for name, value in state.items() if name not in _PLACE})
        wrong = [
            f"{_SETTINGS.get(name, name)}: {saved.get(name)!r} in the state, {expected.get(name)!r} here"
            for name in dict.fromkeys([*expected, *saved])
            if saved.get(name) != expected.get(name)
        ]
        if wrong:
            if saved.get("digest") != expected["digest"] and "digest" in saved:
                raise OtherBatchesError(
                    "the sequences are others than those that the run began with, or in another order (digest "
                    f"{saved['digest']} in the state, {expected['digest']} here); resume with the same data: the same "
                    "index, or the same items, labels and options that say what becomes of long ones"
                )
            raise OtherBatchesError(
                f"the sampler's state is of another run ({'; '.join(wrong)}); resume with its own settings, of which "
                "none that says what comes when can be changed"
            )
        place = [state.get(name) for name in _PLACE]
        is_valid = all(isinstance(value, int) and value >= 0 for value in place)
        before = (self._epoch, self._position, self._step)
        if is_valid:
            self._rewind(epoch=state["epoch"], position=state["position"], step=state["step"])
        if not is_valid or self._number == len(self._ends) or self._starts[self._number] != self._position:
            self._rewind(epoch=before[0], position=before[1], step=before[2])
            raise InputError(
                f"the sampler's state is damaged: epoch, position and step are {place}; resume from another"
            )

    def _rewind(self, *, epoch: int, position: int, step: int) -> None:
        self._epoch, self._position, self._step = epoch, position, step
        self._arrange_epoch()
        self._number = int(np.searchsorted(self._ends, position, side="right"))

    def _arrange_epoch(self) -> None:
        if self._arranged != self._epoch:
            self._ids, self._ends = self.arrange(self._epoch)
            self._starts = np.concatenate([[0], self._ends[:-1]]).astype(np.int64)
            self._arranged = self._epoch

    def _advance(self) -> None:
        end = int(self._ends[self._number])
        if end == len(self._ids):
            self._rewind(epoch=self._epoch + 1, position=0, step=self._step + 1)
        else:
            self._position, self._step, self._number = end, self._step + 1, self._number + 1


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a tree by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _one_of(tokens_per_step: int | None, sequences_per_step: int | None) -> Budget:
    """The budget of tokens or of sequences; ``InputError`` unless one of the two is given, and possible."""
    budgets = {f"{Setting.TOKENS_PER_STEP}": tokens_per_step, f"{Setting.SEQUENCES_PER_STEP}": sequences_per_step}
    set_budgets = {name: budget for name, budget in budgets.items() if budget is not None}
    if len(set_budgets) != 1:
        raise InputError(f"set exactly one of {' and '.join(budgets)}; {len(set_budgets)} of them are set")
    for name, budget in set_budgets.items():
        if budget < 1:
            raise InputError(f"{name} is {budget}; at least 1 is needed")
    return Budget(tokens=tokens_per_step, max_sequences=sequences_per_step)
