"""Whatever a user keeps sequences in, as a corpus: an index on disk, a dataset, a list."""

import hashlib
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lengthwise.api.columns import Columns
from lengthwise.api.item_values import Expected, Row, is_mapping
from lengthwise.api.kinds import Kinds, kinds_of
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.rules import View, apply_max_length
from lengthwise.data.store import open_index

_log = logging.getLogger("lengthwise")
READ_TWICE = 8
"""Items that are read a second time, to see whether they are the same."""
REPORT_S = 10.0
"""Seconds between two messages while items are read."""


class Store(Protocol):
    """Sequences by id, before any rule."""

    @property
    def lengths(self) -> LengthIndex:
        """Of all of them, in tokens."""
        ...

    def tokens(self, id: int, /) -> np.ndarray:
        """Of one."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Items:
    """Sequences that the items of a dataset hold: one each, or several where items are rows packed before."""

    items: Any
    columns: Columns
    lengths: LengthIndex
    numbers: np.ndarray
    """The item of each sequence."""
    starts: np.ndarray
    """Where in its item each sequence begins."""
    checksums: np.ndarray
    """Of each item, as it was first read."""
    used: frozenset[str] = frozenset()
    """What items have beside tokens: ``labels``, ``special``, or arguments of the forward."""
    largest: tuple[int, int] | None = None
    """The largest token id, and its item; None: items are no token ids."""
    largest_label: tuple[int, int] | None = None
    """The largest label that is predicted, and its item; None: items are no token ids."""
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)
    _last: dict[int, Row] = field(default_factory=dict)

    def tokens(self, id: int, /) -> np.ndarray:
        """Token ids, or whatever an item is."""
        return self._cut(self._row(id).tokens, id)

    def labels(self, id: int, /) -> np.ndarray:
        """The item's own labels: for each token itself, or what is ignored."""
        labels = self._row(id).labels
        assert labels is not None, "items have labels"
        return self._cut(labels, id)

    def special(self, id: int, /) -> np.ndarray:
        """[length] booleans: tokens that are never hidden."""
        special = self._row(id).special
        assert special is not None, "items say which tokens are special"
        return self._cut(special, id)

    def passed(self, name: str, id: int, /) -> np.ndarray:
        """What the forward gets of a column, one value per token."""
        return self._cut(self._row(id).passed[name], id)

    def _cut(self, values: np.ndarray, id: int) -> np.ndarray:
        start = int(self.starts[id])
        slots = len(values) if len(self.numbers) == len(self.checksums) else int(self.lengths.lengths[id])
        return values[start : start + slots]

    def _row(self, id: int) -> Row:
        """The item of a sequence, read once for its tokens, labels and other columns.

        Raises:
            LengthwiseError: it is another one than when its length was read.
        """
        number = int(self.numbers[id])
        if number not in self._last:
            row = self.columns.read(number, self.items[number])
            if _checksum(row) != int(self.checksums[number]):
                raise _changed(number)
            self._last.clear()
            self._last[number] = row
        return self._last[number]


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
    def largest_token(self) -> tuple[int, str] | None:
        """The largest id of all sequences and where it is; None: they are something else, or it is not known."""
        if isinstance(self.store, Items):
            largest = self.store.largest
            return None if largest is None else (largest[0], f"item {largest[1]}")
        vocab_size = getattr(self.store, "vocab_size", None)
        return None if vocab_size is None else (int(vocab_size) - 1, "the corpus")

    @property
    def largest_label(self) -> tuple[int, str] | None:
        """The largest label of all items that is predicted and where it is; None: it is not known."""
        largest = self.store.largest_label if isinstance(self.store, Items) else None
        return None if largest is None else (largest[0], f"item {largest[1]}")

    @property
    def labels(self) -> Callable[[int], np.ndarray] | None:
        """Labels of one sequence; None: its own tokens are its labels."""
        return self._column("labels")

    @property
    def special(self) -> Callable[[int], np.ndarray] | None:
        """Which tokens of one sequence are never hidden; None: any may be."""
        return self._column("special")

    @property
    def passed(self) -> Mapping[str, Callable[[int], np.ndarray]]:
        """By name, further arguments of the forward for the tokens of one sequence."""
        store = self.store
        names = store.used - {"labels", "special"} if isinstance(store, Items) else ()
        return {name: _Passed(self, name) for name in sorted(names)}

    def kinds(self) -> Mapping[str, np.ndarray]:
        """Slots that differ, by column; nothing where slots are no tokens."""
        return self.store.kinds if isinstance(self.store, Items) else kinds_of(self.tokens, len(self.lengths.lengths))

    def _column(self, name: str) -> Callable[[int], np.ndarray] | None:
        store = self.store
        if not isinstance(store, Items) or name not in store.used:
            return None
        read = getattr(store, name)
        return lambda id: self._cut(read(int(self.view.base_ids[id])), id)

    def _cut(self, values: np.ndarray, id: int) -> np.ndarray:
        start = int(self.view.starts[id])
        return values[start : start + int(self.lengths.lengths[id])]


@dataclass(frozen=True)
class _Passed:
    """One column of sequences that the forward takes."""

    sequences: Sequences
    name: str

    def __call__(self, id: int) -> np.ndarray:
        """Its values for the tokens of a sequence."""
        store = self.sequences.store
        assert isinstance(store, Items), "items have columns"
        return self.sequences._cut(store.passed(self.name, int(self.sequences.view.base_ids[id])), id)


def read_sequences(
    corpus: Any,
    *,
    max_length: int | None = None,
    over_length: str = "error",
    slot_tokens: int = 1,
    expected: Expected | None = None,
    say: Callable[[str], None] = _log.info,
) -> Sequences:
    """The sequences of a folder made by ``lengthwise index``, of an open corpus, or of anything with items.

    Items are arrays of token ids, dictionaries with ``input_ids``, or with other ``slot_tokens`` arrays whose first
    axis is the slots. Every item is read once, for its length and its columns; ``say`` is told how far that is, and
    which columns are not used.

    Raises:
        InputError: there is no such folder, an item has no tokens or a column that cannot be used, or a sequence is
            over ``max_length``.
    """
    store: Store
    expected = expected or Expected(slot_tokens=slot_tokens)
    if isinstance(corpus, str | PathLike):
        store = open_index(str(Path(corpus)))
    elif isinstance(getattr(corpus, "lengths", None), LengthIndex) and hasattr(corpus, "tokens"):
        store = corpus
    else:
        _check_has_items(corpus)
        store = _items(corpus, Columns(expected), say)
    if slot_tokens > 1 and over_length in ("truncate", "split"):
        raise InputError(
            f"over_length={over_length} cuts tokens, and slots of {slot_tokens} tokens cannot be cut; use drop"
        )
    if expected.needs_labels and not isinstance(store, Items):
        raise InputError("an index holds tokens alone, and the model learns from labels: give items with labels")
    return Sequences(store, apply_max_length(store.lengths, max_length=max_length, rule=over_length))  # type: ignore[arg-type]


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
    stream = " (a stream: write it to disk, or list(...) it, for steps are planned by lengths)"
    is_stream = hasattr(corpus, "__iter__")
    raise InputError(
        f"a corpus is a folder made by `lengthwise index`, or has items and a number of them; {name} has not"
        + (stream if is_stream else "")
    )


@dataclass
class _Scan:
    """What reading all items once gives."""

    lengths: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    largest: tuple[int, int] = (-1, -1)
    largest_label: tuple[int, int] = (-1, -1)
    num_targets: int = 0
    used: frozenset[str] | None = None
    """Of the first item."""
    kinds: Kinds = field(default_factory=Kinds)


def _items(corpus: Any, columns: Columns, say: Callable[[str], None]) -> Items:
    count = _number_of(corpus)
    if not count:
        raise InputError("the corpus is empty: there is no sequence to train on")
    scan, size = _Scan(), columns.expected.slot_tokens
    state, reported_s = hashlib.blake2b(digest_size=8), time.monotonic()
    for number in range(count):
        row = _read(corpus, number, columns)
        _check_alike(scan, number, row, columns.expected)
        state.update(np.ascontiguousarray(row.tokens).tobytes())
        for values in (row.labels, row.special, *row.passed.values()):
            state.update(b"" if values is None else np.ascontiguousarray(values).tobytes())
        scan.checksums.append(_checksum(row))
        _count(scan, number, row, columns.expected)
        for start, end in pairwise(row.bounds):
            scan.lengths.append((end - start) * size)
            scan.numbers.append(number)
            scan.starts.append(start)
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            say(f"reading lengths: {number + 1:,} of {count:,} items")
    _check_repeatable(corpus, columns, scan.checksums)
    if size == 1 and not scan.num_targets:
        raise InputError(
            f"no token of the {count:,} items has a loss: "
            + (
                f"all labels of tokens that are predicted are {columns.expected.ignore_index}"
                if "labels" in (scan.used or ())
                else "next tokens are learned from items of two tokens or more"
            )
        )
    _report(columns, count, len(scan.lengths), say)
    return Items(
        items=corpus,
        columns=columns,
        lengths=LengthIndex(lengths=np.array(scan.lengths, dtype=np.int64), corpus_digest=state.hexdigest()),
        numbers=np.array(scan.numbers, dtype=np.int64),
        starts=np.array(scan.starts, dtype=np.int64),
        checksums=np.array(scan.checksums, dtype=np.int64),
        used=scan.used or frozenset(),
        largest=scan.largest if size == 1 else None,
        largest_label=scan.largest_label if size == 1 else None,
        kinds=scan.kinds.columns(),
    )


def _count(scan: _Scan, number: int, row: Row, expected: Expected) -> None:
    """Note the largest token and label, and how many tokens of the item have a loss."""
    if expected.slot_tokens > 1:
        return
    scan.kinds.add(row.tokens, row.labels, row.passed)
    largest = int(row.tokens.max())
    if largest > scan.largest[0]:
        scan.largest = largest, number
    is_first = np.zeros(len(row.tokens), dtype=bool)
    is_first[list(row.bounds[:-1])] = expected.objective == NEXT_TOKEN
    labels = (row.tokens if row.labels is None else row.labels)[~is_first]
    labels = labels[labels != expected.ignore_index]
    scan.num_targets += len(labels)
    if len(labels) and int(labels.max()) > scan.largest_label[0]:
        scan.largest_label = int(labels.max()), number


def _number_of(corpus: Any) -> int:
    try:
        return len(corpus)
    except Exception as error:
        raise InputError(
            f"{type(corpus).__name__} has no number of items ({type(error).__name__}: {error}); steps are planned by "
            "lengths: give a dataset with a length"
        ) from error


def _read(corpus: Any, number: int, columns: Columns) -> Row:
    try:
        item = corpus[number]
    except Exception as error:
        raise InputError(
            f"item {number} of {type(corpus).__name__} could not be read ({type(error).__name__}: {error}); a corpus "
            "gives each item by its number, from 0 to its length"
        ) from error
    return columns.read(number, item)


def _check_alike(scan: _Scan, number: int, row: Row, expected: Expected) -> None:
    """Raise ``InputError`` where an item has other columns with a meaning than the first one."""
    used = frozenset(
        [
            *(["labels"] if row.labels is not None else []),
            *(["special"] if row.special is not None else []),
            *row.passed,
        ]
    )
    if scan.used is None:
        scan.used = used
    if used == scan.used:
        return
    name = min(used ^ scan.used)
    words = {"labels": "labels (or a mask of tokens that have a loss)", "special": "special_tokens_mask"}
    first, this = ("item 0", f"item {number}") if name in scan.used else (f"item {number}", "item 0")
    raise InputError(
        f"{first} has {words.get(name, name)} and {this} has none; give every item its own"
        + (f", {expected.ignore_index} where a token has no loss" if name == "labels" else "")
        + ", or leave the column out of all"
    )


def _check_repeatable(corpus: Any, columns: Columns, checksums: list[int]) -> None:
    """Raise ``InputError`` if some items are others when they are read again."""
    for number in np.unique(np.linspace(0, len(checksums) - 1, READ_TWICE).astype(int)).tolist():
        if _checksum(_read(corpus, number, columns)) != checksums[number]:
            raise InputError(str(_changed(number)))


def _changed(number: int) -> LengthwiseError:
    return LengthwiseError(
        f"item {number} is another one each time that it is read, so ranks that share a sequence would not compute the "
        "same; draw what is random from the number of the item (np.random.default_rng(number)), or in the forward and "
        "inputs= with micro_batch.normal and dropout"
    )


def _checksum(row: Row) -> int:
    """Of all that the model gets of an item."""
    checksum = zlib.crc32(repr((row.tokens.shape, row.bounds, *row.passed)).encode())
    for values in (row.tokens, row.labels, row.special, *row.passed.values()):
        checksum = checksum if values is None else zlib.crc32(np.ascontiguousarray(values).data, checksum)
    return checksum


def _report(columns: Columns, num_items: int, num_sequences: int, say: Callable[[str], None]) -> None:
    """Name the columns that are not used, and say how many sequences packed rows had."""
    if columns.unused:
        names = ", ".join(f"{name} ({reason})" if reason else name for name, reason in columns.unused.items())
        say(f"columns of items that are not used: {names}")
    if num_sequences > num_items:
        say(f"{num_items:,} rows that were packed before are split into their {num_sequences:,} sequences")
