"""Slots of items that a loop brings, and that the examples of ``prepare`` had not: packs are compared again with them.

A forward may treat a token in a way of its own, and a loss a weight of zero. Ordinary text has ever new tokens, so
comparisons come at growing distances: at the 1st step with new ones, the 2nd, 4th, 8th and so on.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.wording import counted
from lengthwise.runtime.comm.objects import gather_json
from lengthwise.runtime.loop.brought_items import LABELS, TOKENS, SequenceColumns
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.session.check_sample import MOST, DistinctSlots

MOST_COMPARED = 10
"""Comparisons of one run."""
MOST_BROUGHT = 256
"""New slots of each rank that are compared."""
MOST_NAMED = 4
"""Tokens that a message names."""
WAY_OUT = "give prepare such items among its examples"
_SIGN = "sign of "


class NewKinds:
    """Knows which tokens, labels and signs of loss columns packs were compared with."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared, self._slots = prepared, DistinctSlots()
        self._num_steps = self._num_compared = 0
        self._is_due = False
        self._note(prepared.collator.kinds)

    def changes(self, sequences: Iterable[SequenceColumns]) -> dict[str, str]:
        """What packs are to be compared with again, in words: slots of these sequences, and others before them."""
        collator = self._prepared.collator
        if self._prepared.wrapped_model.by_sequence is not None or TOKENS not in collator.kinds:
            return {}
        before = self._slots.num_slots
        for columns in sequences:
            self._add(columns)
        if self._slots.num_slots > before:
            self._num_steps += 1
            self._is_due |= self._num_steps & (self._num_steps - 1) == 0 and self._num_compared < MOST_COMPARED
        return {"the items": self._in_words()} if self._is_due else {}

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Within, the corpus has what is new on all ranks, if anything is; every rank enters it."""
        prepared, before = self._prepared, self._prepared.collator
        said = {name: values[:MOST_BROUGHT].tolist() for name, values in self._new().items()}
        parts = [part for part in gather_json(prepared.world, said) if part]
        kinds = {
            name: np.concatenate([*(np.array(part[name], dtype=old.dtype) for part in parts), old])[:MOST]
            for name, old in before.kinds.items()
        }
        prepared.collator = replace(before, kinds=kinds)
        try:
            yield bool(parts)
        except InfeasibleError:  # nor is there memory at the next step
            self._take_for_compared(kinds if parts else {})
            raise
        finally:
            prepared.collator = before
        self._take_for_compared(kinds if parts else {})

    def _in_words(self) -> str:
        new, before = self._new(), self._prepared.collator.kinds[TOKENS]
        tokens = np.setdiff1d(new.get(TOKENS, before[:0]), before).tolist()
        if not tokens:
            return f"have values of columns that no example had ({WAY_OUT})"
        named = ", ".join(map(str, tokens[:MOST_NAMED])) + (", ..." if len(tokens) > MOST_NAMED else "")
        return f"have {counted(len(tokens), 'token')} that no example had ({named}; {WAY_OUT})"

    def _new(self) -> dict[str, np.ndarray]:
        return {name: values for name, values in self._slots.columns().items() if not name.startswith(_SIGN)}

    def _take_for_compared(self, kinds: Mapping[str, np.ndarray]) -> None:
        if kinds:
            self._is_due, self._num_compared = False, self._num_compared + 1
            self._note(kinds)

    def _note(self, kinds: Mapping[str, np.ndarray]) -> None:
        """Take slots for compared."""
        if kinds:
            self._add(kinds)
        self._slots.forget()

    def _add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Look at the columns that the corpus' slots have; of those for a loss, at signs."""
        names, of_loss = self._prepared.collator.kinds, self._prepared.collator.loss_columns
        if not all(name in columns for name in names):
            return
        tokens, loss = (
            np.asarray(columns[TOKENS]),
            {name: np.asarray(columns[name]) for name in of_loss if name in names},
        )
        passed = {name: columns[name] for name in names if name not in (TOKENS, LABELS, *loss)}
        signs = {_SIGN + n: _signs(v) for n, v in loss.items() if v.shape == tokens.shape}
        self._slots.add(tokens, columns[LABELS] if LABELS in names else None, {**passed, **signs}, loss)


def _signs(values: np.ndarray) -> np.ndarray:
    """1, 0 or -1 for each value; numbers without a sign, and booleans, have none below 0."""
    return (values > 0).astype(np.int64) - (values < 0)
