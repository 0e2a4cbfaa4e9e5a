"""Items of a dataset as sequences: read once for their lengths and columns, and again when they are computed."""

import hashlib
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN, attention_length
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.lengths import LengthIndex
from lengthwise.runtime.wrap.corpus_window import CorpusWindow
from lengthwise.runtime.wrap.refused_draws import item_read
from lengthwise.session.channel_kinds import ChannelKinds
from lengthwise.session.check_sample import DistinctSlots
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns, ItemRow
from lengthwise.session.label_counts import LabelCounts
from lengthwise.session.sequence_ends import SequenceEnds
from lengthwise.session.sequence_units import check_all_units, shared_tree

_log = logging.getLogger("lengthwise")

READ_TWICE = 8
"""Items that are read a second time, to see whether they are the same."""
REPORT_S = 10.0
"""Seconds between two messages while items are read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetItems:
    """Sequences that the items of a dataset hold: one each, or several where items are units or packed before."""

    items: Any
    columns: ItemColumns
    lengths: LengthIndex
    numbers: np.ndarray
    """The item of each sequence."""
    starts: np.ndarray
    """Where in its item each sequence begins."""
    checksums: np.ndarray
    """Of each item, as it was first read."""
    used: frozenset[str] = frozenset()
    """What items have beside tokens: ``labels``, ``special``, arguments of the forward, or columns for the loss."""
    largest: tuple[int, int] | None = None
    """The largest token id, and its item; None: items are no token ids."""
    largest_label: tuple[int, int] | None = None
    """The largest label that is predicted, and its item; None: items are no token ids."""
    label_counts: LabelCounts = field(default_factory=LabelCounts)
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)
    ends: SequenceEnds = field(default_factory=SequenceEnds)
    windows: tuple[CorpusWindow, ...] = ()
    """Slots of several sequences, where they have numbers that are no token ids."""
    offsets: np.ndarray | None = None
    """[units + 1] the first sequence of each item and their number, where items are units; None: they are not."""
    num_slots: np.ndarray | None = None
    """Slots of every unit with what its sequences share once, where they share it."""
    attention_lengths: np.ndarray | None = None
    """Of every unit, as in ``GlobalBatch``; None: items are single sequences."""
    _last: dict[int, ItemRow] = field(default_factory=dict)

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
        slots = int(self.lengths.lengths[id]) // self.columns.expected.slot_tokens
        slots = len(values) if len(self.numbers) == len(self.checksums) else slots
        return values[start : start + slots]

    def _row(self, id: int) -> ItemRow:
        """The item of a sequence, read once for its tokens, labels and other columns.

        Raises:
            LengthwiseError: it is another one than when its length was read.
        """
        number = int(self.numbers[id])
        if number not in self._last:
            with item_read():
                row = self.columns.read(number, self.items[number])
            if _checksum(row) != int(self.checksums[number]):
                raise _changed(number)
            self._last.clear()
            self._last[number] = row
        return self._last[number]


MOST_NAMED = 8
"""Items whose numbers a message has."""


@dataclass
class _Scan:
    """What reading all items once gives."""

    channels: ChannelKinds
    kinds: DistinctSlots
    ends: SequenceEnds = field(default_factory=SequenceEnds)
    labels: LabelCounts = field(default_factory=LabelCounts)
    lengths: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    largest: tuple[int, int] = (-1, -1)
    largest_label: tuple[int, int] = (-1, -1)
    num_targets: int = 0
    without_targets: list[int] = field(default_factory=list)
    """Numbers of items of which no token has a loss."""
    used: frozenset[str] | None = None
    """Of the first item."""
    has_units: bool = False
    """The same."""
    offsets: list[int] = field(default_factory=lambda: [0])
    num_slots: list[int] = field(default_factory=list)
    attention_lengths: list[int] = field(default_factory=list)


def read_items(corpus: Any, columns: ItemColumns, say: Callable[[str], None]) -> DatasetItems:
    """The sequences of all items, each of which is read once; ``say`` is told how far that is.

    Raises:
        InputError: an item cannot be used, or others have other columns, or some are units and others are not.
    """
    count = _number_of(corpus)
    if not count:
        raise InputError("the corpus is empty: there is no sequence to train on")
    scan, size = _scan_of(count, columns.expected), columns.expected.slot_tokens
    state, reported_s = hashlib.blake2b(digest_size=8), time.monotonic()
    for number in range(count):
        row = _read(corpus, number, columns)
        _check_alike(scan, number, row, columns.expected)
        state.update(np.ascontiguousarray(row.tokens).tobytes())
        for values in (row.labels, row.special, *row.passed.values()):
            state.update(b"" if values is None else np.ascontiguousarray(values).tobytes())
        state.update(repr(row.bounds).encode() if row.is_unit else b"")
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
    _report(columns, count, len(scan.lengths), scan.has_units, say)
    if scan.without_targets:
        _report_without_targets(scan.without_targets, count, say)
    if scan.num_slots:
        _report_shared(sum(scan.lengths), sum(scan.num_slots), columns.expected, say)
    return DatasetItems(
        items=corpus,
        columns=columns,
        lengths=_lengths(scan, state.hexdigest()),
        numbers=np.array(scan.numbers, dtype=np.int64),
        starts=np.array(scan.starts, dtype=np.int64),
        checksums=np.array(scan.checksums, dtype=np.int64),
        used=scan.used or frozenset(),
        largest=scan.largest if size == 1 else None,
        largest_label=scan.largest_label if size == 1 else None,
        label_counts=scan.labels,
        kinds=scan.kinds.columns(scan.channels.slots()),
        ends=scan.ends,
        windows=scan.channels.windows(),
        offsets=np.array(scan.offsets, dtype=np.int64) if scan.has_units else None,
        num_slots=np.array(scan.num_slots, dtype=np.int64) if scan.num_slots else None,
        attention_lengths=size * np.array(scan.attention_lengths, dtype=np.int64) if scan.has_units else None,
    )


def _lengths(scan: _Scan, digest: str) -> LengthIndex:
    """Lengths of the sequences, each with the number of its item."""
    lengths, numbers = (np.array(values, dtype=np.int64) for values in (scan.lengths, scan.numbers))
    return LengthIndex(lengths=lengths, corpus_digest=digest, numbers=numbers)


def _scan_of(count: int, expected: ExpectedColumns) -> _Scan:
    return _Scan(ChannelKinds(count), DistinctSlots(expected.special_tokens))


def _report_without_targets(numbers: list[int], count: int, say: Callable[[str], None]) -> None:
    """Say which items teach nothing, by which a step may have no loss at all."""
    listed = ", ".join(map(str, numbers[:MOST_NAMED])) + (", ..." if len(numbers) > MOST_NAMED else "")
    say(
        f"{len(numbers):,} of {count:,} items have no token with a loss ({listed}): they are computed and teach "
        "nothing, and a step of them alone is skipped; leave them out of the corpus, or raise "
        "sequences_per_step or tokens_per_step"
    )


def _count_unit(scan: _Scan, row: ItemRow, expected: ExpectedColumns) -> None:
    lengths = np.diff(row.bounds)
    scan.offsets.append(scan.offsets[-1] + len(lengths))
    num_slots, num_pairs = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
    if expected.shares_prefixes and row.labels is not None:
        tree = shared_tree(row, expected)
        num_slots, num_pairs = tree.num_slots, tree.num_pairs
        scan.num_slots.append(num_slots)
    scan.attention_lengths.append(attention_length(num_slots, num_pairs))


def _count(scan: _Scan, number: int, row: ItemRow, expected: ExpectedColumns) -> None:
    """Note the largest token and label, what labels are, and how many tokens of the item have a loss."""
    if row.is_unit:
        _count_unit(scan, row, expected)
    of_loss = {name: values for name, values in row.passed.items() if name in expected.loss_columns}
    of_model = {name: values for name, values in row.passed.items() if name not in of_loss}
    looked = (*["tokens"] * (expected.slot_tokens > 1), *of_loss)
    all_columns = {"tokens": row.tokens, **({} if row.labels is None else {"labels": row.labels}), **row.passed}
    scan.ends.add(all_columns, row.bounds)
    if looked:
        scan.channels.add(number, all_columns, looked, row.bounds)
    if expected.slot_tokens > 1:
        return
    scan.kinds.add(row.tokens, row.labels, of_model, of_loss)
    scan.labels.add(row, ignored=expected.ignore_index)
    largest = int(row.tokens.max())
    if largest > scan.largest[0]:
        scan.largest = largest, number
    is_first = np.zeros(len(row.tokens), dtype=bool)
    is_first[list(row.bounds[:-1])] = expected.objective == NEXT_TOKEN
    labels = (row.tokens if row.labels is None else row.labels)[~is_first]
    labels = labels[labels != expected.ignore_index]
    scan.num_targets += len(labels)
    if not len(labels):
        scan.without_targets.append(number)
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


def _read(corpus: Any, number: int, columns: ItemColumns) -> ItemRow:
    try:
        item = corpus[number]
    except Exception as error:
        raise InputError(
            f"item {number} of {type(corpus).__name__} could not be read ({type(error).__name__}: {error}); a corpus "
            "gives each item by its number, from 0 to its length"
        ) from error
    return columns.read(number, item)


def _check_alike(scan: _Scan, number: int, row: ItemRow, expected: ExpectedColumns) -> None:
    """Raise ``InputError`` where an item has other columns with a meaning than the first one."""
    used = row.used
    if scan.used is None:
        scan.used, scan.has_units = used, row.is_unit
    check_all_units(number, row.is_unit, scan.has_units)
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


def _check_repeatable(corpus: Any, columns: ItemColumns, checksums: list[int]) -> None:
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


def _checksum(row: ItemRow) -> int:
    """CRC-32 of all that the model gets of an item."""
    checksum = zlib.crc32(repr((row.tokens.shape, row.bounds, *row.passed)).encode())
    for values in (row.tokens, row.labels, row.special, *row.passed.values()):
        checksum = checksum if values is None else zlib.crc32(np.ascontiguousarray(values).data, checksum)
    return checksum


def _report_shared(num_tokens: int, num_slots: int, expected: ExpectedColumns, say: Callable[[str], None]) -> None:
    """Say how many tokens sequences share; warn if it is none."""
    if num_slots < num_tokens:
        shared = num_tokens - num_slots
        say(f"{shared:,} of {num_tokens:,} tokens ({shared / num_tokens:.0%}) begin several sequences, and are shared")
        return
    _log.warning(
        "share_prefixes=True, but no two sequences of an item begin with the same tokens without a loss, so nothing is "
        "shared; give the prompt's tokens labels of %d (or a completion_mask), and sequences of one prompt as one item",
        expected.ignore_index,
    )


def _report(
    columns: ItemColumns, num_items: int, num_sequences: int, has_units: bool, say: Callable[[str], None]
) -> None:
    """Name the columns that are not used, and say how many sequences packed rows had."""
    if columns.unused:
        names = ", ".join(f"{name} ({reason})" if reason else name for name, reason in columns.unused.items())
        say(f"columns of items that are not used: {names}")
    if num_sequences > num_items and not has_units:
        say(f"{num_items:,} rows that were packed before are split into their {num_sequences:,} sequences")


def warn_of_columns(columns: ItemColumns) -> None:
    """Warn of columns of integers by token that nothing uses, which a forward may have been meant to get.

    Those that are one number everywhere, such as ids of segments where each item is one, say nothing.
    """
    meant = [name for name, is_by_token in columns.maybe_meant.items() if is_by_token]
    if names := [name for name in meant if columns.only_values[name] is None]:
        _log.warning(
            "columns of items that hold an integer for each token are not used, as the model's forward names no such "
            "argument: %s. To give it one, name it there (def forward(self, ..., %s=None)), or keep it by "
            "loss_columns=(%r,) and make the forward's arguments with inputs=; else leave it out of the items",
            ", ".join(names), names[0], names[0],
        )  # fmt: skip
