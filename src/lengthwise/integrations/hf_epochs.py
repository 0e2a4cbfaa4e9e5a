"""Epochs as transformers' Trainer has them: in the order of a sampler, and of a dataset that has another in each.

A sampler that a subclass makes is drawn from when its epoch begins, as there, and may name items often or never. A
dataset with ``set_epoch`` is told of each epoch: steps are planned by lengths, so the items of all epochs are read
before training, and are the items of one corpus, epoch after epoch.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.order import make_order
from lengthwise.data.sampler import batch_of
from lengthwise.runtime.comm.collectives import gather_rows

_PLACE = ("epoch", "position", "step")
_WORDS = {
    "digest": "digest of the items",
    "sequences_per_step": f"{Setting.SEQUENCES_PER_STEP}",
    "size": "items of an epoch",
}
"""What makes up the epochs of a checkpoint."""
Draw = Callable[[int], np.ndarray]
"""From the number of an epoch to the items that it has, in order."""


class ItemsOfEpochs:
    """The items of a dataset in each of a number of epochs, one epoch after the other."""

    def __init__(self, dataset: Any, num_epochs: int) -> None:
        """``dataset``: has ``set_epoch``, which is called whenever the item to be read is of another epoch."""
        self._dataset, self._num_epochs, self._num_items, self._epoch = dataset, num_epochs, len(dataset), -1

    def __len__(self) -> int:
        return self._num_epochs * self._num_items

    def __getitem__(self, number: int) -> Any:
        epoch, place = divmod(number, self._num_items)
        if epoch != self._epoch:
            self._dataset.set_epoch(epoch)
            self._epoch = epoch
            if len(self._dataset) != self._num_items:
                raise InputError(
                    f"train_dataset has {self._num_items} items, and {len(self._dataset)} after set_epoch({epoch}); "
                    "transformers plans its steps by the first number: give every epoch as many"
                )
        return self._dataset[place]


class SampledOrder:
    """The items of each epoch by a sampler of torch, drawn in every process alike."""

    def __init__(self, sampler: Iterable[Any], *, num_items: int, device: torch.device) -> None:
        self._sampler, self._num_items, self._device = sampler, num_items, device
        self._num_drawn = 0
        self._items = np.empty(0, dtype=np.int64)

    def __call__(self, epoch: int) -> np.ndarray:
        """The items of ``epoch``; those of the epochs before it are drawn first. Every rank calls this.

        Raises:
            InputError: they are no items of the dataset, other than the sampler's length says, or ranks differ.
        """
        while self._num_drawn <= epoch:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(self._num_drawn)
            self._items, problem = self._draw()
            self._num_drawn += 1
            digest = -1 if problem else zlib.crc32(self._items.tobytes())
            digests = gather_rows(torch.tensor([digest], device=self._device)).flatten().tolist()
            if -1 in digests:
                raise InputError(problem or "the sampler of another rank failed")
            if len(set(digests)) > 1:
                raise InputError(
                    f"{self._name} gives ranks different items in epoch {epoch}; give every rank the whole order, from "
                    "a generator with a seed: who computes which sequence is planned"
                )
        return self._items

    @property
    def _name(self) -> str:
        return f"_get_train_sampler's {type(self._sampler).__name__}"

    def _draw(self) -> tuple[np.ndarray, str]:
        """The items of the next epoch, and why they cannot be used, or an empty string."""
        values, size = list(self._sampler), len(cast(Any, self._sampler))
        try:
            items = np.array([int(value) for value in values], dtype=np.int64)
        except (TypeError, ValueError):
            return np.empty(0, dtype=np.int64), f"{self._name} gives {values[0]!r} where a number of an item is needed"
        outside = items[(items < 0) | (items >= self._num_items)]
        if len(outside):
            return items, f"{self._name} gives item {outside[0]}, and items are 0 to {self._num_items - 1}"
        if len(items) != size:
            return items, f"{self._name} has a length of {size} and gives {len(items)} items; make the two the same"
        return items, ""


class EpochBatches:
    """Global batches of as many sequences each, of the items that each epoch has."""

    def __init__(
        self, lengths: LengthIndex, *, objective: str, draw: Draw, sequences_per_step: int, stride: int, size: int
    ) -> None:
        """Begin with the first epoch.

        Args:
            lengths: of all items, of which ``stride`` are of each epoch; 0: the same ones are of all.
            objective: which tokens have a loss.
            draw: the items of an epoch, which is called when the epoch begins.
            sequences_per_step: items of a batch; the last one of an epoch may have fewer.
            stride: items of the dataset in each epoch, if they are others in each.
            size: items that an epoch draws.
        """
        self._lengths, self._objective, self._draw, self._stride, self._size = lengths, objective, draw, stride, size
        self._sequences_per_step = sequences_per_step
        self._identity = {"digest": lengths.digest, "sequences_per_step": sequences_per_step, "size": size}
        self.epoch = self.position = self.step = 0
        self._items: np.ndarray | None = None
        """Those of the epoch under way; None: none of it has come."""

    def __iter__(self) -> "EpochBatches":
        return self

    def __next__(self) -> GlobalBatch:
        if self._items is None:
            self._items = self._draw(self.epoch)
        end = min(self._size, self.position + self._sequences_per_step)
        ids = self._items[self.position : end] + self.epoch * self._stride
        batch = batch_of(self._lengths, ids, step=self.step, objective=self._objective)
        self.position, self.step = end, self.step + 1
        if end == self._size:
            self.epoch, self.position, self._items = self.epoch + 1, 0, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it is, and the items of the epoch under way, which a sampler may not give again."""
        items = None if self._items is None else self._items.tolist()
        return {**self._identity, **{name: getattr(self, name) for name in _PLACE}, "items": items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; a sampler is drawn from as often as before, so that its generator is where it was.

        Raises:
            InputError: the state is of other data or other batches.
        """
        changed = [
            f"{_WORDS[name]}: {state.get(name)} in the checkpoint, {value} here"
            for name, value in self._identity.items() if state.get(name) != value
        ]  # fmt: skip
        if changed:
            raise InputError(
                f"the checkpoint is of other epochs ({'; '.join(changed)}); resume with the dataset, the sampler, the "
                "sizes and the number of epochs that it was trained with"
            )
        self.epoch, self.position, self.step = (state[name] for name in _PLACE)
        self._items = None
        if state["items"] is not None:
            self._draw(self.epoch)
            self._items = np.array(state["items"], dtype=np.int64)


class EpochPlan:
    """What the epochs of a training have: the items of its dataset, and the batches that are made of them."""

    def __init__(self, dataset: Any, args: Any, options: dict[str, Any]) -> None:
        """Plan epochs of every item, in the order of the TrainingArguments; ``options``: of ``lengthwise.prepare``."""
        self.dataset, self._args, self._options = dataset, args, options
        self.size = self._num_items = len(dataset)
        """Items that an epoch draws."""
        self.order = order = "shuffled" if _plain(args.train_sampling_strategy) == "random" else "corpus"
        self._draw: Draw = lambda epoch: make_order(order).arrange(
            np.arange(self._num_items), seed=args.seed, epoch=epoch
        )
        self._stride = 0
        self._reason = ""
        """Why batches are made here; empty: they are those of :func:`lengthwise.prepare`."""

    def follow(self, sampler: Any) -> None:
        """Take items in the order of a sampler; None: as the dataset has them.

        Raises:
            InputError: it does not say how many items an epoch has.
        """
        self._reason = "_get_train_sampler"
        if sampler is None:
            self._draw = lambda epoch: np.arange(self._num_items)
            return
        if not hasattr(sampler, "__len__") or not len(sampler) or type(sampler).__name__ == "BatchRebalanceSampler":
            raise InputError(
                f"_get_train_sampler gives a {type(sampler).__name__} that does not say how many items an epoch has, "
                "or has none; give a sampler of numbers of items, with a length of 1 or more"
            )
        self.size = len(sampler)
        self._draw = SampledOrder(sampler, num_items=self._num_items, device=self._args.device)

    def tell_epochs(self) -> None:
        """Have ``set_epoch`` of the dataset called with each epoch, where there is such a method."""
        if not callable(getattr(self.dataset, "set_epoch", None)):
            return
        num_epochs = self._num_epochs()
        self.dataset = ItemsOfEpochs(self.dataset, num_epochs)
        if num_epochs > 1:
            self._reason, self._stride = "train_dataset.set_epoch", self._num_items

    @property
    def make_stream(self) -> Callable[[LengthIndex, str], tuple[EpochBatches, int]] | None:
        """Makes the batches and says how many an epoch has; None: they are those of :func:`lengthwise.prepare`.

        Raises:
            InputError: options of ``prepare`` ask for other batches.
        """
        if not self._reason:
            return None
        size, rule = self._options.get("tokens_per_step"), self._options.get("over_length")
        if size is not None:
            raise InputError(
                f"lengthwise={{'tokens_per_step': {size}}}: with {self._reason}, all steps have as many sequences, as "
                "in transformers; leave it out"
            )
        if rule in ("drop", "split"):
            raise InputError(
                f"lengthwise={{'over_length': {rule!r}}}: with {self._reason}, every item is one sequence; use "
                f"'truncate', or {rule} what is too long in the dataset"
            )
        return self._made

    def _made(self, lengths: LengthIndex, objective: str) -> tuple[EpochBatches, int]:
        batches = EpochBatches(
            lengths, objective=objective, draw=self._draw, sequences_per_step=self._options["sequences_per_step"],
            stride=self._stride, size=self.size,
        )  # fmt: skip
        return batches, self._num_batches()

    def _num_batches(self) -> int:
        return math.ceil(self.size / self._options["sequences_per_step"])

    def _num_epochs(self) -> int:
        """Epochs that the training begins, at least 1; 2 for several, where batches are cut by tokens."""
        if self._args.max_steps < 0:
            return max(1, math.ceil(self._args.num_train_epochs))
        is_counted = "sequences_per_step" in self._options
        return max(1, math.ceil(self._args.max_steps / self._num_batches())) if is_counted else 2


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
