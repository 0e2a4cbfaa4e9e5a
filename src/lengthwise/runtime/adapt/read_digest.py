"""Digests of what a rank reads of sequences that it shares with others, who must have read the same."""

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lengthwise.runtime.adapt.micro_batch import Feeding, Source
from lengthwise.runtime.adapt.shard import Shard

_SHIFT = 0x9E3779B1


def digested(feeding: Feeding, shard: Shard) -> Feeding:
    """The same feeding, which adds a digest of every sequence to ``shard`` when it is first read."""
    labels = feeding.labels
    source = _Digested(feeding.source, _noting(shard, 1))
    return replace(feeding, source=source, labels=None if labels is None else _Labels(labels, _noting(shard, 2)))


Note = Callable[[int, np.ndarray], np.ndarray]


def _noting(shard: Shard, kind: int) -> Note:
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
    def __init__(self, source: Source, note: Note) -> None:
        self._source, self._note = source, note

    def tokens(self, sequence: int, /) -> np.ndarray:
        """Of a sequence."""
        return self._note(sequence, self._source.tokens(sequence))


class _Labels:
    def __init__(self, labels: Callable[[int], np.ndarray], note: Note) -> None:
        self._labels, self._note = labels, note

    def __call__(self, sequence: int) -> np.ndarray:
        return self._note(sequence, self._labels(sequence))
