"""Run synthetic sequences through a prepared model, to check or measure it before the first batch of the corpus."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import gcd
from typing import Any

import numpy as np
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.run_state import MicroBatchMaker
from lengthwise.runtime.loop.whole_items import WholeItems, whole_items
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.corpus_window import LONGEST

LENGTHS = (11, 7)
"""Slots of the two sequences that a model is traced with; sizes that models rarely have otherwise."""
MOST_ITEMS = 1 << 16
"""Sequences whose items lend their numbers to those that a model is compared on."""
FEWEST = 3
"""Slots of the first one, at least: both then have a target of next tokens, and the two are told apart."""


def traced_lengths(collator: PackCollator) -> tuple[int, int]:
    """Slots of two sequences of coprime lengths; no more than the corpus's longest has, so that tables hold them.

    Lengths which the corpus has where the model is compared on no others.
    """
    if collator.compared_lengths:
        return collator.compared_lengths[0], collator.compared_lengths[1]
    first = LENGTHS[0] if collator.longest is None else max(FEWEST, min(LENGTHS[0], collator.longest))
    return first, next(second for second in range(max(2, first * 7 // 11), first) if gcd(first, second) == 1)


class StretchedSequence:
    """A source that repeats or cuts the first sequence of another source to any length."""

    def __init__(self, tokens: np.ndarray, slot_tokens: int, *, is_ended: bool) -> None:
        """``is_ended``: its last token is the last of each, such as one that says where a sequence ends."""
        self._values, self._slot_tokens, self._is_ended = tokens, slot_tokens, is_ended
        self.lengths: dict[int, int] = {}
        """Tokens by sequence id."""

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence; each id begins elsewhere in the first sequence, so that sequences differ."""
        num_slots = self.lengths[sequence] // self._slot_tokens
        tokens = self._values[(np.arange(num_slots) + 3 * sequence) % len(self._values)]
        return _ended(tokens, self._values) if self._is_ended else tokens

    def labels(self, labels_of: Callable[[int], np.ndarray], sequence: int, /) -> np.ndarray:
        """The labels of a sequence, as the first sequence has them, with a loss for every token."""
        return np.maximum(self.column(labels_of, sequence), 0)

    def column(self, values_of: Callable[[int], np.ndarray], sequence: int, /) -> np.ndarray:
        """The values of a further column for a sequence, repeated from the first sequence."""
        values = values_of(0)
        return values[(np.arange(self.lengths[sequence]) + 3 * sequence) % len(values)]


class VariedSequence(StretchedSequence):
    """A source whose short sequences are windows of several sequences of the corpus, where it has such.

    Longer ones begin with the slots of the corpus that differ, unless those are token ids, which have packs of their
    own, and go on as the first sequence.
    """

    def __init__(self, collator: PackCollator, lengths: tuple[int, ...], *, is_ended: bool) -> None:
        """``lengths``: slots of each sequence."""
        tokens = np.asarray(collator.source.tokens(0))
        super().__init__(tokens, collator.slot_tokens, is_ended=is_ended and tokens.ndim == 1)
        short = [number for number, length in enumerate(lengths) if length <= LONGEST]
        short.sort(key=lambda number: -lengths[number])
        self._window_of = dict(zip(short, cycle(collator.windows))) if collator.windows else {}
        self._kinds = {} if has_kinds_of_ids(collator) or not collator.windows else collator.kinds
        self._collator, self._num_slots = collator, lengths
        longer = [number for number in range(len(lengths)) if number not in self._window_of]
        self._first_slot = {number: 3 * place for place, number in enumerate(longer)}

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence."""
        tokens = self.values("tokens", self._collator.source.tokens, sequence)
        return _ended(tokens, self._values) if self._is_ended else tokens

    def values(self, name: str, values_of: Callable[[int], np.ndarray], sequence: int, /) -> np.ndarray:
        """The values of a column for a sequence."""
        num_slots, window = self._num_slots[sequence], self._window_of.get(sequence)
        if window is not None:
            return window.cut(name, num_slots)
        values = np.asarray(values_of(0))
        if name in self._kinds:
            values = np.concatenate([self._kinds[name], values])
        return values[(np.arange(num_slots) + self._first_slot[sequence]) % len(values)]


def has_kinds_of_ids(collator: PackCollator) -> bool:
    """Whether slots of the corpus are token ids, with other integers by token, and not all the same."""
    kinds = [values for name, values in collator.kinds.items() if name not in collator.loss_columns]
    are_ids = bool(kinds) and all(values.ndim == 1 and values.dtype.kind in "iu" for values in kinds)
    return are_ids and any(len(np.unique(values)) > 1 for values in kinds)


def has_kinds(collator: PackCollator) -> bool:
    """Whether slots of the corpus that differ are token ids, or such with integers for a loss, and not all the same."""
    kinds = [values for name, values in collator.kinds.items() if name not in collator.loss_columns]
    of_loss = [values for name, values in collator.kinds.items() if name in collator.loss_columns]
    are_ids = bool(kinds) and all(values.ndim == 1 and values.dtype.kind in "iu" for values in kinds)
    are_integers = [values for values in of_loss if values.dtype.kind in "biu"]
    return are_ids and any(len(np.unique(values, axis=0)) > 1 for values in [*kinds, *are_integers])


class ReorderedSlots:
    """A source whose sequences have all different slots of the corpus in turn, then again in reverse order."""

    def __init__(self, collator: PackCollator, lengths: tuple[int, ...], *, is_ended: bool) -> None:
        """``is_ended``: the last token of each is that of the first sequence."""
        self._collator, self._lengths, self._is_ended = collator, lengths, is_ended
        tokens, labels = collator.kinds["tokens"], collator.kinds.get("labels")
        self._ignores = labels is not None and bool((labels == collator.ignore_index).any())
        stand_in = tokens if labels is None or collator.objective == NEXT_TOKEN else np.maximum(labels, 0)
        self._labels = stand_in if labels is None else np.where(labels == collator.ignore_index, stand_in, labels)

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence, which continues where the one before ended."""
        tokens = self.column("tokens", sequence)
        return _ended(tokens, np.asarray(self._collator.source.tokens(0))) if self._is_ended else tokens

    def column(self, name: str, sequence: int, /) -> np.ndarray:
        """The values of a further column for a sequence, which continues where the one before ended."""
        return self._cut(self._collator.kinds[name], sequence)

    def labels(self, sequence: int, /) -> np.ndarray:
        """The labels of a sequence; where the corpus ignores some, each sequence ignores another share of its own."""
        labels = self._cut(self._labels, sequence).copy()
        if self._ignores:
            labels[1 :: 2 + sequence % 3] = self._collator.ignore_index
        return labels

    def _cut(self, values: np.ndarray, sequence: int) -> np.ndarray:
        start = sum(self._lengths[:sequence])
        values = np.concatenate([values, np.roll(values[::-1], len(values) // 3)])
        return values[(start + np.arange(self._lengths[sequence])) % len(values)]


class BorderSequences:
    """A source of the short sequences that meet as those of the corpus may."""

    def __init__(self, collator: PackCollator) -> None:
        self._collator = collator

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence."""
        return self._collator.borders[sequence]["tokens"]

    def column(self, name: str, sequence: int, /) -> np.ndarray:
        """The values of a further column for a sequence."""
        return self._collator.borders[sequence][name]

    def labels(self, sequence: int, /) -> np.ndarray:
        """The labels of a sequence, with a loss for every token."""
        return np.maximum(self.column("labels", sequence), 0)


def _repeated(collator: PackCollator, lengths: tuple[int, ...]) -> dict[str, Callable[[int], np.ndarray]]:
    """Columns for the loss of sequences of ``lengths`` slots, repeated from the first sequence."""

    def repeated(values_of: Callable[[int], np.ndarray], sequence: int) -> np.ndarray:
        values = np.asarray(values_of(0))
        return values[np.arange(lengths[sequence]) % len(values)]

    return {name: partial(repeated, values_of) for name, values_of in collator.loss_columns.items()}


def _ended(tokens: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Replace the last token by that of another sequence: Bart's classifier reads the token that ends a sequence."""
    return np.concatenate([tokens[:-1], like[-1:]])


def _first_alone(labels_of: Callable[[int], np.ndarray], ignored: int, sequence: int, /) -> np.ndarray:
    """The label of a whole sequence, at its first token as that of items."""
    labels = labels_of(sequence)
    return np.concatenate([labels[:1], np.full_like(labels[1:], ignored)])


@contextmanager
def _replaced(run: MicroBatchMaker, **changes: Any) -> Iterator[None]:
    """Within, the run's collator has other sequences and columns, of no special tokens and no shared prefixes.

    Each has the number of an item of its own, also where items are split or units. Warnings of the user's code are not
    shown, and raised by no filter of the user's: its data may never have what they are about.
    """
    before = run.collator
    if run.wrapped_model.labels_sequences:
        changes["labels"] = partial(_first_alone, changes["labels"], before.ignore_index)
    items = before.item_numbers
    items = None if items is None else np.unique(items[:MOST_ITEMS])
    run.collator = replace(before, **{"item_numbers": items, **changes}, special=None, shared=None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        run.collator = before


@contextmanager
def _of_corpus(run: MicroBatchMaker, items: WholeItems) -> Iterator[None]:
    """Within, the run's sequences 0, 1, ... are whole items of the corpus."""
    with _replaced(run, **items.changes()):
        yield


@contextmanager
def synthetic_of_all_kinds(run: MicroBatchMaker, lengths: tuple[int, ...]) -> Iterator[None]:
    """Within, the run's sequences 0, 1, ... have ``lengths`` slots, of all kinds of slots in the corpus."""
    before = run.collator
    if (items := whole_items(before, lengths)) is not None:
        with _of_corpus(run, items):
            yield
        return
    source = ReorderedSlots(before, lengths, is_ended=run.wrapped_model.by_sequence is not None)
    with _replaced(
        run,
        source=source,
        labels=before.labels and source.labels,
        passed={name: partial(source.column, name) for name in before.passed},
        loss_columns={
            name: partial(source.column, name) if name in before.kinds else repeated
            for name, repeated in _repeated(before, lengths).items()
        },
    ):
        yield


@contextmanager
def synthetic_borders(run: MicroBatchMaker, lengths: tuple[int, ...]) -> Iterator[None]:
    """Within, the run's sequences 0, 1, ... are those that meet as sequences of the corpus may; ``lengths``: theirs."""
    before, source = run.collator, BorderSequences(run.collator)
    assert lengths == tuple(len(border["tokens"]) for border in before.borders[: len(lengths)]), "as they are listed"
    with _replaced(
        run,
        source=source,
        labels=before.labels and (source.tokens if before.objective == NEXT_TOKEN else source.labels),
        passed={name: partial(source.column, name) for name in before.passed},
        loss_columns={name: partial(source.column, name) for name in before.loss_columns},
    ):
        yield


@contextmanager
def varied(run: MicroBatchMaker, lengths: tuple[int, ...]) -> Iterator[None]:
    """Within, the run's sequences 0, 1, ... have ``lengths`` slots, of several of its sequences where they differ."""
    before = run.collator
    if (items := whole_items(before, lengths)) is not None:
        with _of_corpus(run, items):
            yield
        return
    if not before.windows:
        with synthetic(run, lengths):
            yield
        return
    source = VariedSequence(before, lengths, is_ended=run.wrapped_model.by_sequence is not None)

    def labels(sequence: int) -> np.ndarray:
        assert before.labels is not None, "the corpus has labels"
        return np.maximum(source.values("labels", before.labels, sequence), 0)

    with _replaced(
        run,
        source=source,
        labels=before.labels and (source.tokens if before.objective == NEXT_TOKEN else labels),
        passed={name: partial(source.values, name, values_of) for name, values_of in before.passed.items()},
        loss_columns={name: partial(source.values, name, values_of) for name, values_of in before.loss_columns.items()},
    ):
        yield


@contextmanager
def synthetic(run: MicroBatchMaker, lengths: tuple[int, ...]) -> Iterator[None]:
    """Within, the run's sequences 0, 1, ... have ``lengths`` slots, repeated from its first sequence."""
    before = run.collator
    if (items := whole_items(before, lengths)) is not None:
        with _of_corpus(run, items):
            yield
        return
    is_ended = run.wrapped_model.by_sequence is not None
    source = StretchedSequence(np.asarray(before.source.tokens(0)), before.slot_tokens, is_ended=is_ended)
    source.lengths = {number: length * before.slot_tokens for number, length in enumerate(lengths)}
    passed = {name: partial(source.column, values_of) for name, values_of in before.passed.items()}
    labels = before.labels and (
        source.tokens if before.objective == NEXT_TOKEN else partial(source.labels, before.labels)
    )
    with _replaced(
        run,
        source=source,
        labels=labels,
        passed=passed,
        loss_columns=_repeated(before, lengths),
    ):
        yield


def summed_loss(run: MicroBatchMaker, sequences: tuple[int, ...]) -> Tensor:
    """The loss summed over the targets of ``sequences`` in one pack, computed by this rank alone."""
    slots = traced_lengths(run.collator)
    pack = Pack(ids=sequences, lengths=tuple(slots[number] * run.collator.slot_tokens for number in sequences))
    shard = whole_shard(run, pack)
    with active(shard):
        micro_batch = run.make(shard, pack)
        loss = run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch)
    shard.passes.clear()  # in a circle with its micro-batch, the shard would keep the graph and its weights for long
    if loss.dim():
        raise InputError(f"the loss has shape {tuple(loss.shape)}; it is to be one number, the mean over the targets")
    return loss * micro_batch.num_targets


def whole_shard(run: MicroBatchMaker, pack: Pack) -> PackShard:
    """The shard of a pack that this rank computes alone, without noise."""
    return PackShard(
        step=0, seed=run.seed, ids=pack.ids, cu_seqlens=run.collator.cu_seqlens(pack), group=run.alone,
        tree=run.collator.tree(pack),
        device=run.world.device, has_noise=False,
    )  # fmt: skip


def zero_loss(run: MicroBatchMaker) -> Tensor:
    """A loss of zero that depends on all parameters, whose backward adds nothing to any gradient."""
    with synthetic(run, traced_lengths(run.collator)):
        return summed_loss(run, (0,)) * 0.0
