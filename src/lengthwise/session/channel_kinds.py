"""Slots and sequences of a corpus that differ in numbers that are no token ids: frames, patches, columns for a loss.

A channel may be zero in most items and not in some, such as a flag of frames that are given; a forward may treat those
in a way of its own. Items are looked at while their lengths are read. Of each channel the first slot is kept that is
zero, above or below, and those with its least and greatest value; and of sequences those in which a channel is zero
everywhere, nowhere, or here and there, as in none before.
"""

from collections.abc import Mapping

import numpy as np

from lengthwise.runtime.wrap.corpus_window import LONGEST, CorpusWindow

MOST_CHANNELS = 64
"""An axis with more is taken as one channel."""
LOOKED_AT = 1 << 24
"""Bytes of values up to which every item is looked at."""
SPREAD = 64
"""Items that are looked at whatever their size, evenly spread, with the first and the last."""
MOST_BYTES = 1 << 24
"""Bytes of slots that are kept."""
_NEW = 2
"""Sequences that are kept for what none before them has."""

Columns = Mapping[str, np.ndarray]


class ChannelKinds:
    """The slots and windows of sequences that a model is compared on, beside those of the first item."""

    def __init__(self, count: int) -> None:
        """``count``: the number of items."""
        self._spread = set(np.linspace(0, count - 1, SPREAD).astype(int).tolist())
        self._looked_at = self._kept_bytes = 0
        self._seen: dict[str, np.ndarray] = {}
        self._states: dict[str, np.ndarray] = {}
        self._first: list[Columns] = []
        self._extremes: dict[tuple[str, int, bool], tuple[float, Columns]] = {}
        self._form: dict[str, tuple[int, ...]] = {}
        self._new: list[CorpusWindow] = []
        self._others: dict[int, CorpusWindow] = {}
        self._middle, self._last = count // 2, count - 1

    def add(self, number: int, columns: Columns, looked: tuple[str, ...], bounds: tuple[int, ...]) -> None:
        """Look at the channels of the columns ``looked`` of an item, whose sequences have ``bounds``."""
        looked = tuple(name for name in looked if columns[name].dtype.kind in "biuf")
        size = sum(columns[name].nbytes for name in looked)
        form = {name: values.shape[1:] for name, values in columns.items()}
        self._form = self._form or form
        if not looked or not len(columns["tokens"]) or form != self._form:
            return
        if number not in self._spread and self._looked_at + size > LOOKED_AT:
            return
        self._looked_at += size
        place, is_new = 0, False
        for name in looked:
            for axis, channels in enumerate(_channels(columns[name])):
                key = f"{name}/{axis}"
                slots = self._slots_of_new_signs(key, channels)
                self._keep(columns, slots)
                self._note_extremes(key, channels, columns)
                is_new_here = self._is_new_sequence(key, channels)
                place = int(slots[0]) if len(slots) and (is_new_here or not is_new) else place
                is_new |= is_new_here
        self._note_window(number, columns, bounds, place, is_new=is_new)

    def _slots_of_new_signs(self, key: str, channels: "_Channels") -> np.ndarray:
        """The first slots in which a channel is zero, above or below, as in none before."""
        seen = self._seen.setdefault(key, np.zeros((3, channels.least.shape[1]), dtype=bool))
        signs = np.stack([channels.has_zero, channels.greatest > 0, channels.least < 0], axis=1)  # [slots, 3, channels]
        is_new = signs & ~seen
        seen |= signs.any(axis=0)
        flat = is_new.reshape(len(is_new), -1)
        return np.unique(flat.argmax(axis=0)[flat.any(axis=0)])

    def _is_new_sequence(self, key: str, channels: "_Channels") -> bool:
        """Whether a channel is zero everywhere, nowhere, or here and there, as in no item before."""
        is_zero = (channels.least == 0) & (channels.greatest == 0)
        states = np.stack([is_zero.all(axis=0), ~channels.has_zero.any(axis=0)])
        states = np.concatenate([states, ~np.any(states, axis=0, keepdims=True)])
        seen = self._states.setdefault(key, np.zeros_like(states))
        is_new = bool((states & ~seen).any())
        seen |= states
        return is_new

    def _note_extremes(self, key: str, channels: "_Channels", columns: Columns) -> None:
        for is_greatest, values in ((False, -channels.least), (True, channels.greatest)):
            slots = values.argmax(axis=0)
            for channel, value in enumerate(values.max(axis=0).tolist()):
                before = self._extremes.get((key, channel, is_greatest))
                if before is None and not self._has_room(columns):
                    return
                if before is None or value > before[0]:
                    slot = int(slots[channel])
                    self._extremes[key, channel, is_greatest] = value, _cut(columns, slot, slot + 1)

    def _keep(self, columns: Columns, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            if self._has_room(columns):
                self._first.append(_cut(columns, slot, slot + 1))

    def _has_room(self, columns: Columns) -> bool:
        """Whether one more slot may be kept, which is counted."""
        size = sum(values[:1].nbytes for values in columns.values())
        if self._kept_bytes + size > MOST_BYTES:
            return False
        self._kept_bytes += size
        return True

    def _note_window(self, number: int, columns: Columns, bounds: tuple[int, ...], place: int, *, is_new: bool) -> None:
        if number not in (0, self._middle, self._last) and (not is_new or len(self._new) >= _NEW):
            return
        first = max(bound for bound in bounds[:-1] if bound <= place)
        end = min(bound for bound in bounds[1:] if bound > place)
        start = max(first, min(place - LONGEST // 2, end - LONGEST))
        window = CorpusWindow(columns=_cut(columns, start, min(end, start + LONGEST)), place=place - start)
        if number == 0 or not is_new or len(self._new) >= _NEW:
            self._others[number] = window
        else:
            self._new.append(window)

    def slots(self) -> dict[str, np.ndarray]:
        """All columns of the slots that were kept, each slot once."""
        slots = [*self._first, *(slot for _, slot in self._extremes.values())]
        unique = {b"".join(values.tobytes() for values in slot.values()): slot for slot in slots}
        names = slots[0] if slots else ()
        return {name: np.concatenate([slot[name] for slot in unique.values()]) for name in names}

    def windows(self) -> tuple[CorpusWindow, ...]:
        """Windows of sequences: the first that is unlike the first item, that item, and others."""
        others = [self._others[number] for number in sorted(self._others)]
        return (*self._new[:1], *others[:1], *self._new[1:], *reversed(others[1:]))


class _Channels:
    """The least and the greatest value of each channel of a slot, and whether any is zero."""

    least: np.ndarray
    greatest: np.ndarray
    has_zero: np.ndarray

    def __init__(self, values: np.ndarray) -> None:
        """``values``: [slots, channels, places]."""
        self.least, self.greatest = (reduced(axis=2).astype(np.float64) for reduced in (values.min, values.max))
        self.has_zero = np.any(values == 0, axis=2)


def _channels(values: np.ndarray) -> list[_Channels]:
    """The channels of a column along its last axis, and of images along the axis before height and width as well."""
    size = len(values)
    if not values[0].size:
        return []
    values = values.astype(np.uint8) if values.dtype.kind == "b" else values
    axes = {values.ndim - 1, *[1] * (values.ndim > 3)} if values.ndim > 1 else set()
    arrays = [
        np.ascontiguousarray(np.moveaxis(values, axis, 1)).reshape(size, values.shape[axis], -1)
        for axis in sorted(axes)
        if values.shape[axis] <= MOST_CHANNELS
    ]
    return [_Channels(array) for array in arrays or [values.reshape(size, 1, -1)]]


def _cut(columns: Columns, start: int, end: int) -> Columns:
    return {name: np.array(values[start:end]) for name, values in columns.items()}
