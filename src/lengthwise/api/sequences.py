"""Whatever a user keeps sequences in, as a corpus: an index on disk, a dataset, a list."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.rules import View, apply_max_length
from lengthwise.data.store import open_index

TOKENS, LABELS, MASK = ("input_ids", "tokens", "ids"), "labels", "attention_mask"
"""Entries of items that are dictionaries."""


class Store(Protocol):
    """Sequences by id, before any rule."""

    @property
    def lengths(self) -> LengthIndex:
        """Of all of them, in tokens."""
        ...

    def tokens(self, id: int, /) -> np.ndarray:
        """Of one."""
        ...


@dataclass(frozen=True, eq=False)
class Items:
    """Sequences that a dataset holds."""

    items: Any
    lengths: LengthIndex
    has_labels: bool = False
    largest: int | None = None
    """Token id; None: items are no token ids."""

    def tokens(self, id: int, /) -> np.ndarray:
        """Token ids, or whatever an item is."""
        return _values(self.items[id])

    def labels(self, id: int, /) -> np.ndarray:
        """The item's own labels: for each token itself, or what is ignored."""
        return np.asarray(self.items[id][LABELS])


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a run, after the length rule."""

    store: Store
    view: View

    @property
    def lengths(self) -> LengthIndex:
        """What sampler and planner work on."""
        return self.view.lengths

    def tokens(self, id: int, /) -> np.ndarray:
        """Token ids of one sequence, or ``[slots, ...]`` of anything."""
        return self._cut(self.store.tokens(int(self.view.base_ids[id])), id)

    @property
    def largest_token(self) -> int | None:
        """The largest id of all sequences; None where they are something else, or it is not known."""
        if isinstance(self.store, Items):
            return self.store.largest
        vocab_size = getattr(self.store, "vocab_size", None)
        return None if vocab_size is None else int(vocab_size) - 1

    @property
    def labels(self) -> Callable[[int], np.ndarray] | None:
        """Labels of one sequence; None: its own tokens are its labels."""
        store = self.store
        if not isinstance(store, Items) or not store.has_labels:
            return None
        return lambda id: self._cut(store.labels(int(self.view.base_ids[id])), id)

    def _cut(self, values: np.ndarray, id: int) -> np.ndarray:
        start = int(self.view.starts[id])
        return values[start : start + int(self.lengths.lengths[id])]


def read_sequences(
    corpus: Any, *, max_length: int | None = None, over_length: str = "error", slot_tokens: int = 1
) -> Sequences:
    """The sequences of a folder made by ``lengthwise index``, of an open corpus, or of anything with items.

    Items are arrays of token ids, dictionaries with ``input_ids``, or with other ``slot_tokens`` arrays whose first
    axis is the slots. Every item is read once, for its length.

    Raises:
        InputError: there is no such folder, an item has no tokens, or a sequence is over ``max_length``.
    """
    store: Store
    if isinstance(corpus, str | PathLike):
        store = open_index(str(Path(corpus)))
    elif isinstance(getattr(corpus, "lengths", None), LengthIndex) and hasattr(corpus, "tokens"):
        store = corpus
    elif hasattr(corpus, "__len__") and hasattr(corpus, "__getitem__"):
        store = _items(corpus, slot_tokens)
    else:
        raise InputError(
            f"a corpus is a folder made by `lengthwise index`, or has items and a number of them; "
            f"{type(corpus).__name__} has not"
        )
    if slot_tokens > 1 and over_length in ("truncate", "split"):
        raise InputError(
            f"over_length={over_length} cuts tokens, and slots of {slot_tokens} tokens cannot be cut; use drop"
        )
    return Sequences(store, apply_max_length(store.lengths, max_length=max_length, rule=over_length))  # type: ignore[arg-type]


def _items(corpus: Any, slot_tokens: int) -> Items:
    if not len(corpus):
        raise InputError("the corpus is empty: there is no sequence to train on")
    has_labels = slot_tokens == 1 and hasattr(corpus[0], "keys") and LABELS in corpus[0]
    state = hashlib.blake2b(digest_size=8)
    lengths, largest = np.zeros(len(corpus), dtype=np.int64), -1
    for number in range(len(corpus)):
        item = corpus[number]
        values = _values(item)
        if values.dtype.kind in "US":
            raise InputError(
                f"item {number} is text; a corpus holds token ids: tokenise it first (tokenizer(texts)['input_ids']), "
                "or make an index of the files with `lengthwise index`"
            )
        if not values.size:
            raise InputError(f"item {number} is empty; leave items without tokens out")
        if slot_tokens == 1 and (values.ndim != 1 or not np.issubdtype(values.dtype, np.integer)):
            raise InputError(
                f"item {number} is {values.dtype} of shape {values.shape}, not a row of token ids; of sequences of "
                "anything else say how many tokens each element of the first axis is: slot_tokens"
            )
        if hasattr(item, "keys") and MASK in item and not np.asarray(item[MASK]).all():
            raise InputError(
                f"item {number} has an {MASK} with zeros: a pack has no padding, and would learn from it; give the "
                "tokens alone (a tokenizer with padding=False)"
            )
        if has_labels and (LABELS not in item or len(item[LABELS]) != len(values)):
            num_labels = len(item[LABELS]) if LABELS in item else 0
            raise InputError(
                f"item {number} has {len(values)} tokens and {num_labels} labels; give each token its own, -100 where "
                "it is not to be predicted"
            )
        lengths[number] = len(values) * slot_tokens
        largest = max(largest, int(values.max())) if slot_tokens == 1 else -1
        state.update(np.ascontiguousarray(values).tobytes())
    index = LengthIndex(lengths=lengths, corpus_digest=state.hexdigest())
    return Items(corpus, index, has_labels, largest if slot_tokens == 1 else None)


def _values(item: Any) -> np.ndarray:
    if hasattr(item, "keys"):
        name = next((name for name in TOKENS if name in item), None)
        if name is None:
            raise InputError(f"an item has {', '.join(item)}, and none of {', '.join(TOKENS)}")
        item = item[name]
    return np.asarray(item)
