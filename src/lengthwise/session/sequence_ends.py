"""How sequences of a corpus begin and end: what meets in packs where one follows another, and nowhere else.

A forward may read a slot and the one before it together: whether tokens are equal, or both end a line, or by how much
a number jumps. So packs are compared in which sequences meet as those of the corpus may.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice, pairwise, product

import numpy as np

Columns = Mapping[str, np.ndarray]

SLOTS = 4
"""Of each end, at most."""
MOST_ENDS, MOST_BYTES = 4096, 1 << 24
"""Different ones that are kept, of beginnings as of ends, and their bytes."""
MOST_EQUAL, MOST_JUMPS = 4, 4
"""Borders at which a token meets the same one, and at which a number jumps; those of common ends come on top."""
COMMON = 2
"""Ends, and beginnings, of which all borders are compared."""


class SequenceEnds:
    """The different beginnings and ends of sequences."""

    def __init__(self) -> None:
        self._first, self._last = _Ends(), _Ends()
        self._form: dict[str, tuple[int, ...]] = {}
        self._tokens = set[int](), set[int]()
        """With which sequences begin, and with which they end; of sequences of token ids."""

    def add(self, columns: Columns, bounds: tuple[int, ...]) -> None:
        """Look at the sequences of an item, which have ``bounds``, unless its columns are other ones than before."""
        form = {name: values.shape[1:] for name, values in columns.items()}
        self._form = self._form or form
        if form != self._form or any(len(values) != bounds[-1] for values in columns.values()):
            return
        tokens = columns["tokens"]
        for start, end in pairwise(bounds):
            if start < end:
                if tokens.ndim == 1 and tokens.dtype.kind in "iu":
                    self._tokens[0].add(int(tokens[start]))
                    self._tokens[1].add(int(tokens[end - 1]))
                self._first.add(columns, range(start, min(end, start + SLOTS)), meets=start)
                self._last.add(columns, range(max(start, end - SLOTS), end), meets=end - 1)

    @property
    def meeting(self) -> set[int]:
        """The tokens that some sequence ends and another begins with."""
        return self._tokens[0] & self._tokens[1]

    def borders(self, longest: int, *, are_all: bool, met: Collection[int] = ()) -> tuple[Columns, ...]:
        """Short sequences that follow one another as those of the corpus may.

        Args:
            longest: slots of any of them at most; nothing if that is one.
            are_all: no sequence begins or ends otherwise; if not, some token meets the same one in any case.
            met: tokens whose meeting the same one is left out.
        """
        num_slots = min(SLOTS, longest // 2)
        ends, beginnings = self._last.most_common(-num_slots, None), self._first.most_common(0, num_slots)
        if not ends or not beginnings or not num_slots:
            return ()
        equal = [pair for pair in _equal(ends, beginnings) if int(pair[0]["tokens"][-1]) not in met][:MOST_EQUAL]
        if not equal and not are_all:
            equal = [(ends[0], {name: values[-1:] for name, values in ends[0].items()})]
        jumps, common = islice(_jumps(ends, beginnings), MOST_JUMPS), product(ends[:COMMON], beginnings[:COMMON])
        every: list[tuple[Columns, Columns]] = [*equal, *jumps, *common]
        starts = chain(beginnings[:1], (beginning for _, beginning in every))
        stops = chain((end for end, _ in every), ends[:1])
        return tuple({n: np.concatenate([start[n], stop[n]]) for n in start} for start, stop in zip(starts, stops))


class _Ends:
    """The first slots of sequences, or the last ones."""

    def __init__(self) -> None:
        self._columns: dict[bytes, Columns] = {}
        self._counts: dict[bytes, int] = {}
        self._num_bytes = 0

    def add(self, columns: Columns, slots: range, *, meets: int) -> None:
        """Keep some slots if there is room, and none are kept with one like that which ``meets`` other sequences."""
        key = b"".join(values[meets : meets + 1].tobytes() for values in columns.values())
        if key in self._columns:
            self._counts[key] += 1
        elif len(self._columns) < MOST_ENDS and self._num_bytes + len(key) * len(slots) <= MOST_BYTES:
            self._columns[key] = {n: np.array(values[slots.start : slots.stop]) for n, values in columns.items()}
            self._counts[key] = 1
            self._num_bytes += len(key) * len(slots)

    def most_common(self, start: int, stop: int | None) -> list[Columns]:
        """Different ones, those that most sequences have first; of each the slots from ``start`` to ``stop``."""
        keys = sorted(self._columns, key=lambda key: -self._counts[key])
        return [{name: values[start:stop] for name, values in self._columns[key].items()} for key in keys]


def _equal(ends: list[Columns], beginnings: list[Columns]) -> Iterator[tuple[Columns, Columns]]:
    """An end and a beginning of the same token, of each token that has both; the most common ends first."""
    if ends[0]["tokens"].ndim > 1 or ends[0]["tokens"].dtype.kind not in "iu":
        return
    beginning_with = {int(beginning["tokens"][0]): beginning for beginning in reversed(beginnings)}
    for end in ends:
        if (beginning := beginning_with.pop(int(end["tokens"][-1]), None)) is not None:
            yield end, beginning


def _jumps(ends: list[Columns], beginnings: list[Columns]) -> Iterator[tuple[Columns, Columns]]:
    """The ends and beginnings that differ most in a column of numbers, up and down."""
    for name in [name for name, values in ends[0].items() if values.ndim == 1 and values.dtype.kind == "f"]:
        last = [float(end[name][-1]) for end in ends]
        first = [float(beginning[name][0]) for beginning in beginnings]
        yield ends[int(np.argmax(last))], beginnings[int(np.argmin(first))]
        yield ends[int(np.argmin(last))], beginnings[int(np.argmax(first))]
