"""Slots of a corpus that differ: what a model is compared on before the run, so that no token comes as a surprise.

A forward may treat single tokens in a way of its own: a separator that begins new positions, a token with another
weight in the loss. The first sequence alone need not have them, nor the first thousand tokens that differ: so those
come first that a config names, that lie at either end of a vocabulary, or that most sequences have.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

MOST = 1024
"""Slots that are kept."""
LOWEST, HIGHEST = 32, 256
"""How many of the least and of the greatest values of each column are kept first: where vocabularies have tokens of
their own."""
USUAL = 256
"""How many of the tokens that most sequences have come next."""
FEW, FEW_CHANNELS = 64, 8
"""Values that a column of integers for a loss has at most, in each of so many channels at most, whose every value is
kept: such as classes, kinds of tokens and levels of noise, and no counts or times."""
_OF_FEW = ""
"""In place of a column's name: slots with a value that is new in a column of few."""
_HELD_BYTES = 1 << 26
"""Of the slots from which those are chosen."""
_LOOKED = 1 << 24
"""Tokens that are looked at before every other item is skipped; of as many more, three of four are, and so on."""
_LARGEST = 1 << 22
"""Values are told apart up to this one."""
_BELOW_ZERO = 128
"""Values may be negative down to this one: targets that are ignored."""
_SAMPLED, _SAMPLED_TOKENS = 64, 1 << 16
"""Sequences of an index that are looked at, and tokens of each."""
_SUFFIXES = ("_token_id", "_token_ids", "_token_index")
"""Ends of names under which configs have tokens with a meaning."""


class DistinctSlots:
    """Slots of a corpus that have a token, label or other value that no slot before them has."""

    def __init__(self, special: Collection[int] = ()) -> None:
        """``special``: tokens that are kept before all others, if the corpus has them."""
        self._special = np.array(sorted(special), dtype=np.int64)
        self._seen: dict[str, np.ndarray] = {}
        self._few: dict[tuple[str, int], np.ndarray] = {}
        """The values of each channel of the columns of few that were seen, one more than few at least if there are."""
        self._sequences_with = np.zeros(0, dtype=np.int64)
        """By token."""
        self._parts: list[dict[str, np.ndarray]] = []
        self._is_new: list[dict[str, np.ndarray]] = []
        """Which slots of a part have a value that is new, by column."""
        self._held_bytes = self._num_items = self._num_looked = 0

    def add(
        self,
        tokens: np.ndarray,
        labels: np.ndarray | None,
        passed: Mapping[str, np.ndarray],
        carried: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Look at the slots of one item; columns that are ``carried`` are kept with them, whatever they hold.

        Of those, integers of few values are looked at as well.
        """
        carried = carried or {}
        columns = {"tokens": tokens, **({} if labels is None else {"labels": labels}), **passed}
        are_token_columns = all(
            values.shape == tokens.shape and values.dtype.kind in "iub" for values in columns.values()
        )
        self._num_items += 1
        is_skipped = bool(self._num_items % (1 << min(32, self._num_looked // _LOOKED)))
        if is_skipped or tokens.ndim != 1 or not are_token_columns or not len(tokens):
            return
        self._num_looked += len(tokens)
        firsts = {name: self._first_of(name, values) for name, values in columns.items()}
        places = (tokens.astype(np.int64) + _BELOW_ZERO)[(tokens >= -_BELOW_ZERO) & (tokens < _LARGEST - _BELOW_ZERO)]
        self._sequences_with = _grown(self._sequences_with, places)
        self._sequences_with[places] += 1  # once for each token of the item
        of_few = [self._first_of_few(name, values) for name, values in carried.items() if len(values) == len(tokens)]
        firsts[_OF_FEW] = np.concatenate([np.zeros(0, dtype=np.int64), *of_few])
        slots = np.unique(np.concatenate(list(firsts.values())))
        if not len(slots) or self._held_bytes > _HELD_BYTES:
            return
        ids = {name: np.asarray(values[slots], dtype=np.int64) for name, values in columns.items()}
        self._parts.append({**ids, **{name: np.array(values[slots]) for name, values in carried.items()}})
        self._is_new.append({name: np.isin(slots, first) for name, first in firsts.items()})
        self._held_bytes += sum(values.nbytes for values in self._parts[-1].values())

    @property
    def num_slots(self) -> int:
        """How many are held."""
        return sum(len(part["tokens"]) for part in self._parts)

    def forget(self) -> None:
        """Hold no slots any more; what they have is not new all the same."""
        self._parts.clear()
        self._is_new.clear()
        self._held_bytes = 0

    def _first_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """Where values are that were never seen before, the first of each."""
        shifted = values.astype(np.int64) + _BELOW_ZERO
        places = np.flatnonzero((shifted >= 0) & (shifted < _LARGEST))
        seen = self._seen[name] = _grown(self._seen.get(name, np.zeros(0, dtype=bool)), shifted[places])
        places = places[~seen[shifted[places]]]
        seen[shifted[places]] = True
        return places[np.unique(shifted[places], return_index=True)[1]]

    def _first_of_few(self, name: str, values: np.ndarray) -> np.ndarray:
        """Where integers are that a column of few values had nowhere before, the first of each; none if it has many."""
        channels, places = values.reshape(len(values), -1), [np.zeros(0, dtype=np.int64)]
        if values.dtype.kind not in "biu" or channels.shape[1] > FEW_CHANNELS:
            return places[0]
        for channel in range(channels.shape[1]):
            seen = self._few.get((name, channel), np.zeros(0, dtype=np.int64))
            if len(seen) > FEW:
                continue
            different, first = np.unique(channels[:, channel].astype(np.int64), return_index=True)
            is_new = ~np.isin(different, seen)
            seen = self._few[name, channel] = np.concatenate([seen, different[is_new]])
            places += [first[is_new]] if len(seen) <= FEW else []
        return np.concatenate(places)

    def columns(self, others: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Tokens, labels and other columns of these slots, and of ``others``; nothing if tokens are no integers."""
        forms = [{name: values.shape[1:] for name, values in part.items()} for part in self._parts]
        are_alike = [form == forms[0] for form in forms]
        slots = _joined([part for part, is_alike in zip(self._parts, are_alike) if is_alike])
        if slots:
            is_new = _joined([part for part, is_alike in zip(self._is_new, are_alike) if is_alike])
            chosen = np.argsort(self._ranks(slots, is_new), kind="stable")[:MOST]
            slots = {name: values[chosen] for name, values in slots.items()}
        if not others or (slots and {n: v.shape[1:] for n, v in others.items()} != forms[0]):
            return slots
        return _joined([slots, dict(others)]) if slots else dict(others)

    def _ranks(self, slots: Mapping[str, np.ndarray], is_new: Mapping[str, np.ndarray]) -> np.ndarray:
        """How early each slot is kept, the lowest first: by the values that are new in it."""
        ranks = np.full(len(slots["tokens"]), 4)
        places = np.clip(slots["tokens"] + _BELOW_ZERO, 0, _LARGEST)
        counts = np.where(is_new["tokens"], _grown(self._sequences_with, places)[places], 0)
        ranks[np.argsort(-counts, kind="stable")[:USUAL]] = 3
        values_of = {name: np.unique(slots[name][new]) for name, new in is_new.items() if name and new.any()}
        for name, values in values_of.items():
            ranks[is_new[name] & (slots[name] >= values[-HIGHEST:][0])] = 2
        for name, values in values_of.items():
            ranks[is_new[name] & (slots[name] <= values[:LOWEST][-1])] = 1
        ranks[is_new[_OF_FEW]] = 1
        ranks[is_new["tokens"] & np.isin(slots["tokens"], self._special)] = 0
        return ranks


def _grown(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """``values``, with zeros up to the greatest of ``places`` and some more."""
    if not len(places) or (missing := int(places.max()) + 1 - len(values)) <= 0:
        return values
    return np.concatenate([values, np.zeros(max(missing, len(values)), dtype=values.dtype)])


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def kinds_of(
    tokens_of: Callable[[int], np.ndarray], num_sequences: int, special: Collection[int] = ()
) -> dict[str, np.ndarray]:
    """Slots that differ in a sample of sequences whose items are not read before the run."""
    kinds = DistinctSlots(special)
    for number in sampled(num_sequences):
        tokens = np.asarray(tokens_of(number))
        if tokens.dtype.kind in "iu":
            kinds.add(tokens[:_SAMPLED_TOKENS], None, {})
    return kinds.columns()


def sampled(num_sequences: int) -> list[int]:
    """The numbers of sequences that are looked at where not all are, evenly spread."""
    numbers: list[int] = np.unique(np.linspace(0, num_sequences - 1, _SAMPLED).astype(int)).tolist()
    return numbers


def special_tokens(model: Any) -> frozenset[int]:
    """The tokens that the configs of a model of transformers name, such as of the end of a sequence."""
    special, configs = set[int](), [getattr(model, name, None) for name in ("config", "generation_config")]
    for config in configs:  # which grows by the configs within
        for name, value in (getattr(config, "__dict__", None) or {}).items():
            if hasattr(value, "to_dict"):
                configs.append(value)
            elif name.endswith(_SUFFIXES):
                tokens = value if isinstance(value, list | tuple) else [value]
                special |= {token for token in tokens if isinstance(token, int) and not isinstance(token, bool)}
    return frozenset(special)
