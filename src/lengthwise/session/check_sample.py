"""Slots of a corpus that differ: what a model is compared on before the run, so that no token comes as a surprise.

A forward may treat single tokens in a way of its own: a separator that begins new positions, a token with another
weight in the loss. The first sequence alone need not have them.
"""

from collections.abc import Callable, Mapping

import numpy as np

MOST = 1024
"""Slots that are kept."""
_LARGEST = 1 << 22
"""Values are told apart up to this one."""
_BELOW_ZERO = 128
"""Values may be negative down to this one: targets that are ignored."""
_SAMPLED, _SAMPLED_TOKENS = 64, 1 << 16
"""Sequences of an index that are looked at, and tokens of each."""


class DistinctSlots:
    """The first slots of a corpus that have a token, label or other value that no slot before them has."""

    def __init__(self) -> None:
        self._seen: dict[str, np.ndarray] = {}
        self._parts: list[dict[str, np.ndarray]] = []
        self._count = 0

    def add(
        self,
        tokens: np.ndarray,
        labels: np.ndarray | None,
        passed: Mapping[str, np.ndarray],
        carried: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Look at the slots of one item; columns that are ``carried`` are kept with them, whatever they hold."""
        carried = carried or {}
        columns = {"tokens": tokens, **({} if labels is None else {"labels": labels}), **passed}
        are_token_columns = all(
            values.shape == tokens.shape and values.dtype.kind in "iub" for values in columns.values()
        )
        if self._count >= MOST or tokens.ndim != 1 or not are_token_columns or not len(tokens):
            return
        is_new = np.zeros(len(tokens), dtype=bool)
        for name, values in columns.items():
            is_new[self._first_of(name, values)] = True
        slots = np.flatnonzero(is_new)[: MOST - self._count]
        if len(slots):
            ids = {name: np.asarray(values[slots], dtype=np.int64) for name, values in columns.items()}
            self._parts.append({**ids, **{name: np.array(values[slots]) for name, values in carried.items()}})
            self._count += len(slots)

    def _first_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """Where values are that were never seen before, the first of each."""
        shifted = values.astype(np.int64) + _BELOW_ZERO
        places = np.flatnonzero((shifted >= 0) & (shifted < _LARGEST))
        if not len(places):
            return places
        seen = self._seen.get(name, np.zeros(0, dtype=bool))
        if (missing := int(shifted[places].max()) + 1 - len(seen)) > 0:
            seen = self._seen[name] = np.concatenate([seen, np.zeros(max(missing, len(seen)), dtype=bool)])
        places = places[~seen[shifted[places]]]
        seen[shifted[places]] = True
        return places[np.unique(shifted[places], return_index=True)[1]]

    def columns(self, others: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Tokens, labels and other columns of these slots, and of ``others``; nothing if tokens are no integers."""
        parts = [*self._parts, *([others] if others else [])]
        forms = [{name: values.shape[1:] for name, values in part.items()} for part in parts]
        parts = [part for part, form in zip(parts, forms) if form == forms[0]]
        names = parts[0] if parts else ()
        return {name: np.concatenate([part[name] for part in parts]) for name in names}


def kinds_of(tokens_of: Callable[[int], np.ndarray], num_sequences: int) -> dict[str, np.ndarray]:
    """Slots that differ in a sample of sequences whose items are not read before the run."""
    kinds = DistinctSlots()
    for number in np.unique(np.linspace(0, num_sequences - 1, _SAMPLED).astype(int)).tolist():
        tokens = np.asarray(tokens_of(number))
        if tokens.dtype.kind in "iu":
            kinds.add(tokens[:_SAMPLED_TOKENS], None, {})
    return kinds.columns()
