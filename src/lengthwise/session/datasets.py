"""Whatever a user keeps sequences in, as a corpus: an index on disk, a dataset, a list."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.max_length import CorpusView, apply_max_length
from lengthwise.index.store import open_index
from lengthwise.runtime.wrap.corpus_window import CorpusWindow
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.session.check_sample import kinds_of, sampled
from lengthwise.session.dataset_items import DatasetItems, read_items
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns, is_mapping
from lengthwise.session.sequence_ends import Columns, SequenceEnds

_log = logging.getLogger("lengthwise")


class SequenceStore(Protocol):
    """Sequences by id, before any rule."""

    @property
    def lengths(self) -> LengthIndex:
        """Lengths of all sequences, in tokens."""
        ...

    def tokens(self, id: int, /) -> np.ndarray:
        """Tokens of one sequence."""
        ...


@dataclass(frozen=True, eq=False)
class RunSequences:
    """The sequences of a run, after the length rule; of units, which are planned as one sequence, the members."""

    store: SequenceStore
    view: CorpusView
    ignore_index: int = -100
    """The label of tokens that have no loss."""
    special_tokens: frozenset[int] = frozenset()
    """Tokens that have a meaning of their own, as far as the model says."""

    @cached_property
    def lengths(self) -> LengthIndex:
        """What sampler and planner work on: of a unit, the tokens of all of its members, and how far they attend."""
        of_units = self.store.attention_lengths if isinstance(self.store, DatasetItems) else None
        if of_units is None:
            return self.view.lengths
        return replace(self.view.lengths, attention_lengths=of_units[self.view.base_ids])

    @cached_property
    def computed_lengths(self) -> LengthIndex:
        """Lengths of the sequences that the model computes: of the members of units, else :attr:`lengths`."""
        return self.lengths if self.units is None else LengthIndex(lengths=self.units.lengths)

    @cached_property
    def units(self) -> Units | None:
        """The members of every unit; None: items are no units."""
        if (offsets := unit_offsets(self.store)) is None:
            return None
        sizes = np.diff(offsets)[self.view.base_ids]
        lengths = self.store.lengths.lengths[self._numbers_in_store]
        return Units(offsets=np.concatenate([[0], np.cumsum(sizes)]), lengths=lengths)

    @cached_property
    def _numbers_in_store(self) -> np.ndarray:
        """The number of each sequence before the length rule."""
        base_ids = self.view.base_ids
        if (offsets := unit_offsets(self.store)) is None:
            return base_ids
        starts, sizes = offsets[base_ids], np.diff(offsets)[base_ids]
        return np.arange(sizes.sum()) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)

    @cached_property
    def item_numbers(self) -> np.ndarray | None:
        """[S] the item of each sequence that the model computes, or its number in an index; None: its own number."""
        store, numbers = self.store, self._numbers_in_store
        numbers = store.numbers[numbers] if isinstance(store, DatasetItems) else numbers
        return None if np.array_equal(numbers, np.arange(len(numbers))) else numbers

    def tokens(self, id: int, /) -> np.ndarray:
        """Token ids of one sequence, or ``[slots, ...]`` of anything."""
        return self._cut(self.store.tokens(self._in_store(id)), id)

    @property
    def largest_token(self) -> tuple[int, str] | None:
        """The largest id of all sequences and where it is; None: they are something else, or it is not known."""
        if isinstance(self.store, DatasetItems):
            largest = self.store.largest
            return None if largest is None else (largest[0], f"item {largest[1]}")
        vocab_size = getattr(self.store, "vocab_size", None)
        return None if vocab_size is None else (int(vocab_size) - 1, "the corpus")

    @property
    def largest_label(self) -> tuple[int, str] | None:
        """The largest label of all items that is predicted and where it is; None: it is not known."""
        largest = self.store.largest_label if isinstance(self.store, DatasetItems) else None
        return None if largest is None else (largest[0], f"item {largest[1]}")

    @property
    def labels(self) -> Callable[[int], np.ndarray] | None:
        """Labels of one sequence; None: its own tokens are its labels."""
        return self._labels_of_mask if self.has_loss_mask else self._column("labels")

    @property
    def has_loss_mask(self) -> bool:
        """Whether the corpus is an index that says which of its tokens have a loss."""
        return bool(getattr(self.store, "has_loss_mask", False))

    def _labels_of_mask(self, id: int) -> np.ndarray:
        """Labels of one sequence: its tokens, or the ignored index for those that have no loss."""
        number = self._in_store(id)
        mask = self.store.loss_mask(number)  # type: ignore[attr-defined]
        tokens = self.store.tokens(number).astype(np.int64)
        return self._cut(tokens if mask is None else np.where(mask, tokens, self.ignore_index), id)

    @property
    def special(self) -> Callable[[int], np.ndarray] | None:
        """Which tokens of one sequence are never hidden; None: any may be."""
        return self._column("special")

    @property
    def passed(self) -> Mapping[str, Callable[[int], np.ndarray]]:
        """Further arguments of the forward by name, each a function from a sequence to its values."""
        store = self.store
        names = store.used - {"labels", "special"} if isinstance(store, DatasetItems) else set[str]()
        return {name: _Passed(self, name) for name in sorted(names - set(self._loss_columns))}

    @property
    def loss_columns(self) -> Mapping[str, Callable[[int], np.ndarray]]:
        """Columns for the loss by name, each a function from a sequence to its values."""
        return {name: _Passed(self, name) for name in self._loss_columns}

    @property
    def _loss_columns(self) -> tuple[str, ...]:
        return self.store.columns.expected.loss_columns if isinstance(self.store, DatasetItems) else ()

    @property
    def windows(self) -> tuple[CorpusWindow, ...]:
        """Slots of several sequences, where they have numbers that are no token ids."""
        return self.store.windows if isinstance(self.store, DatasetItems) else ()

    def kinds(self) -> Mapping[str, np.ndarray]:
        """Slots that differ, by column; nothing where slots are no tokens."""
        if isinstance(self.store, DatasetItems):
            return self.store.kinds
        if self.tokens(0).ndim > 1:
            return {}
        return kinds_of(self.tokens, len(self.lengths.lengths), self.special_tokens)

    def borders(self) -> tuple[Columns, ...]:
        """Short sequences that follow one another in a pack as those of the corpus may."""
        longest = self.computed_lengths.max_length
        if isinstance(self.store, DatasetItems):
            longest //= self.store.columns.expected.slot_tokens
            return self.store.ends.borders(longest, are_all=not (self.view.ledger.split or self.view.ledger.truncated))
        ends, num_sequences = SequenceEnds(), len(self.lengths.lengths)
        for number in (numbers := sampled(num_sequences)):
            tokens = np.asarray(self.tokens(number))
            ends.add({"tokens": tokens}, (0, len(tokens)))
        return ends.borders(longest, are_all=len(numbers) == num_sequences)

    def _column(self, name: str) -> Callable[[int], np.ndarray] | None:
        store = self.store
        if not isinstance(store, DatasetItems) or name not in store.used:
            return None
        read = getattr(store, name)
        return lambda id: self._cut(read(self._in_store(id)), id)

    def _in_store(self, id: int) -> int:
        """The number of a sequence before the length rule."""
        return int(self._numbers_in_store[id])

    def _cut(self, values: np.ndarray, id: int) -> np.ndarray:
        if unit_offsets(self.store) is not None:
            return values  # units are not cut
        start = int(self.view.starts[id])
        return values[start : start + int(self.lengths.lengths[id])]


@dataclass(frozen=True)
class _Passed:
    """One column of sequences that the forward takes."""

    sequences: RunSequences
    name: str

    def __call__(self, id: int) -> np.ndarray:
        """Values of the column for the tokens of a sequence."""
        store = self.sequences.store
        assert isinstance(store, DatasetItems), "items have columns"
        return self.sequences._cut(store.passed(self.name, self.sequences._in_store(id)), id)


def read_sequences(
    corpus: Any,
    *,
    max_length: int | None = None,
    over_length: str = "error",
    slot_tokens: int = 1,
    expected: ExpectedColumns | None = None,
    say: Callable[[str], None] = _log.info,
) -> RunSequences:
    """The sequences of a folder made by ``lengthwise index``, of an open corpus, or of anything with items.

    Items are arrays of token ids, dictionaries with ``input_ids``, or with other ``slot_tokens`` arrays whose first
    axis is the slots; or units, tuples of dictionaries. Every item is read once, for its length and its columns;
    ``say`` is told how far that is, and which columns are not used.

    Raises:
        InputError: there is no such folder, an item has no tokens or a column that cannot be used, or a sequence is
            over ``max_length``.
    """
    store: SequenceStore
    expected = expected or ExpectedColumns(slot_tokens=slot_tokens)
    if isinstance(corpus, str | PathLike):
        store = open_index(str(Path(corpus)))
    elif isinstance(getattr(corpus, "lengths", None), LengthIndex) and hasattr(corpus, "tokens"):
        store = corpus
    else:
        _check_has_items(corpus)
        store = read_items(corpus, ItemColumns(expected), say)
    if slot_tokens > 1 and over_length in ("truncate", "split"):
        raise InputError(
            f"over_length={over_length} cuts tokens, and slots of {slot_tokens} tokens cannot be cut; use drop"
        )
    offsets = unit_offsets(store)
    if offsets is not None and over_length in ("truncate", "split"):
        raise InputError(
            f"over_length={over_length} cuts sequences, and items are units, which are not cut; cut their members in "
            "the dataset, or use drop: max_length counts the tokens of a whole unit"
        )
    if expected.loss_columns and not isinstance(store, DatasetItems):
        raise InputError(
            f"an index holds no columns {', '.join(expected.loss_columns)} for a loss: give items with them, or leave "
            "loss_columns out"
        )
    if expected.needs_labels and not isinstance(store, DatasetItems):
        raise InputError("an index holds tokens alone, and the model learns from labels: give items with labels")
    lengths = store.lengths if offsets is None else summed(store, offsets)
    if offsets is not None and max_length is not None and over_length == "error":
        _check_units(lengths, offsets, max_length)
    view = apply_max_length(lengths, max_length=max_length, rule=over_length)  # type: ignore[arg-type]
    sequences = RunSequences(store, view, expected.ignore_index, expected.special_tokens)
    if sequences.has_loss_mask and expected.objective != NEXT_TOKEN:
        raise InputError(
            f"the index says which tokens have a loss, and the model learns {expected.objective!r} instead of next "
            "tokens; index again with --loss all"
        )
    return sequences


def _check_units(lengths: LengthIndex, offsets: np.ndarray, max_length: int) -> None:
    """Raise ``InputError`` if a unit is over ``max_length``."""
    if lengths.max_length > max_length:
        first = int(np.argmax(lengths.lengths > max_length))
        size = int(offsets[first + 1] - offsets[first])
        raise InputError(
            f"item {first}, a unit of {size}, has {int(lengths.lengths[first]):,} tokens in all, over "
            f"max_length={max_length:,}, which counts all tokens of a unit; raise it, cut members in the dataset, or "
            "set over_length='drop'"
        )


def unit_offsets(store: SequenceStore) -> np.ndarray | None:
    """[units + 1] the first sequence of each unit and their number; None: items are no units."""
    return store.offsets if isinstance(store, DatasetItems) else None


def summed(store: SequenceStore, offsets: np.ndarray) -> LengthIndex:
    """Lengths of units: the tokens of all of their members, those once that members share."""
    of_units = store.num_slots if isinstance(store, DatasetItems) else None
    if of_units is None:
        of_units = np.add.reduceat(store.lengths.lengths, offsets[:-1])
    return LengthIndex(lengths=of_units, corpus_digest=store.lengths.corpus_digest)


def _check_has_items(corpus: Any) -> None:
    """Raise ``InputError`` unless ``corpus[number]`` is an item for every number below ``len(corpus)``."""
    name = type(corpus).__name__
    if is_mapping(corpus) and 0 not in corpus:
        keys = [str(key) for key in list(corpus.keys())[:5]]
        if hasattr(corpus, "iloc"):
            way_out = f"give its rows, {name.lower()}.to_dict('records')"
        elif any(key in ("input_ids", "labels", "attention_mask") for key in keys):
            way_out = "give items, [dict(zip(columns, row)) for row in zip(*columns.values())]"
        else:
            way_out = f"give one of its parts, corpus[{keys[0]!r}]" if keys else "give a list of items"
        raise InputError(f"a corpus has items by number; {name} has the keys {', '.join(keys) or 'none'}: {way_out}")
    if hasattr(corpus, "column_names") and hasattr(corpus, "to_pylist"):
        raise InputError(f"a corpus has items by number; {name} has columns: give its rows, table.to_pylist()")
    if hasattr(corpus, "__len__") and hasattr(corpus, "__getitem__"):
        return
    if hasattr(corpus, "dataset") and hasattr(corpus, "batch_size"):
        raise InputError(
            f"{name} gives batches, and a corpus has single items, of which steps are planned: give its dataset, "
            "loader.dataset (what collate_fn adds to an item, the dataset is to add)"
        )
    stream = " (a stream: give examples of its items, and the stream to run.steps(lengthwise.StreamBatches(...)))"
    is_stream = hasattr(corpus, "__iter__")
    raise InputError(
        f"a corpus is a folder made by `lengthwise index`, or has items and a number of them; {name} has not"
        + (stream if is_stream else "")
    )
