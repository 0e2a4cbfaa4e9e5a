"""Digest the tokens and labels that a rank reads of shared sequences, to compare them between ranks."""

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lengthwise.runtime.wrap.collator import PackCollator, SequenceSource
from lengthwise.runtime.wrap.context import PackShard

_SHIFT = 0x9E3779B1


def with_read_digests(collator: PackCollator, shard: PackShard) -> PackCollator:
    """Return a collator that adds a digest of everything it first reads of a sequence to ``shard.read_digest``."""
    labels, special = collator.labels, collator.special
    return replace(
        collator,
        source=_Digested(collator.source, _noting(shard, 1)),
        labels=None if labels is None else _Column(labels, _noting(shard, 2)),
        special=None if special is None else _Column(special, _noting(shard, 3)),
        passed={
            name: _Column(column, _noting(shard, 4 + number))
            for number, (name, column) in enumerate(sorted(collator.passed.items()))
        },
        loss_columns={
            name: _Column(column, _noting(shard, 4 + len(collator.passed) + number))
            for number, (name, column) in enumerate(sorted(collator.loss_columns.items()))
        },
    )


Note = Callable[[int, np.ndarray], np.ndarray]


def _noting(shard: PackShard, kind: int) -> Note:
    seen: set[int] = set()

    def note(sequence: int, values: np.ndarray) -> np.ndarray:
        if sequence not in seen:
            seen.add(sequence)
            array = np.asarray(values)
            array = np.ascontiguousarray(array.astype(np.int64) if array.dtype.kind in "iu" else array)
            high, low = zlib.crc32(array.data, kind), (sequence * _SHIFT + kind) & 0x7FFFFFFF
            shard.read_digest ^= (high * _SHIFT ^ low * low) & ((1 << 62) - 1)
        return values

    return note


class _Digested:
    def __init__(self, source: SequenceSource, note: Note) -> None:
        self._source, self._note = source, note

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence, which are noted."""
        return self._note(sequence, self._source.tokens(sequence))


class _Column:
    def __init__(self, column: Callable[[int], np.ndarray], note: Note) -> None:
        self._column, self._note = column, note

    def __call__(self, sequence: int) -> np.ndarray:
        return self._note(sequence, self._column(sequence))
