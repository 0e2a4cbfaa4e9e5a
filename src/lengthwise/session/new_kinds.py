"""Slots of items that a loop brings, and that the examples of ``prepare`` had not: packs are compared again with them.

A forward may treat a token in a way of its own, and a loss a weight of zero; and a token that begins a sequence may be
the one that another ends with. Ordinary text has ever new tokens, so
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
from lengthwise.session.sequence_ends import SequenceEnds

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
        self._prepared, self._slots, self._ends = prepared, DistinctSlots(), SequenceEnds()
        for border in prepared.collator.borders:
            self._ends.add(border, (0, len(border[TOKENS])))
        self._met = self._ends.meeting
        self._num_steps = self._num_compared = 0
        self._is_due = False
        self._note(prepared.collator.kinds)

    def changes(self, sequences: Iterable[SequenceColumns]) -> dict[str, str]:
        """What packs are to be compared with again, in words: slots of these sequences, and others before them."""
        collator = self._prepared.collator
        if self._prepared.wrapped_model.by_sequence is not None or TOKENS not in collator.kinds:
            return {}
        before = self._slots.num_slots, len(self._ends.meeting)
        for columns in sequences:
            self._add(columns)
            self._add_ends(columns)
        if (self._slots.num_slots, len(self._ends.meeting)) > before:
            self._num_steps += 1
            self._is_due |= self._num_steps & (self._num_steps - 1) == 0 and self._num_compared < MOST_COMPARED
        return {"the items": self._in_words()} if self._is_due else {}

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Within, the corpus has what is new on all ranks, if anything is; every rank enters it."""
        prepared, before = self._prepared, self._prepared.collator
        said = {name: values[:MOST_BROUGHT].tolist() for name, values in self._new().items()}
        meeting = [{name: values.tolist() for name, values in border.items()} for border in self._new_borders()]
        every = gather_json(prepared.world, [said, meeting])
        parts = [part for part, _ in every if part]
        kinds = {
            name: np.concatenate([*(np.array(part[name], dtype=old.dtype) for part in parts), old])[:MOST]
            for name, old in before.kinds.items()
        }
        borders = [
            {name: np.array(border[name], dtype=old.dtype) for name, old in before.borders[0].items()}
            for _, of_rank in every
            for border in of_rank
        ]
        prepared.collator = replace(before, kinds=kinds, borders=(*borders, *before.borders))
        has_new = bool(parts or borders)
        try:
            yield has_new
        except InfeasibleError:  # nor is there memory at the next step
            self._take_for_compared(kinds if has_new else {})
            raise
        finally:
            prepared.collator = before
        self._take_for_compared(kinds if has_new else {})

    def _new_borders(self) -> tuple[Mapping[str, np.ndarray], ...]:
        """Sequences at whose borders tokens meet themselves that did not before; none where none do."""
        if not self._ends.meeting - self._met:
            return ()
        longest = max(len(border[TOKENS]) for border in self._prepared.collator.borders)
        return self._ends.borders(longest, are_all=True, met=self._met)

    def _in_words(self) -> str:
        new, before = self._new(), self._prepared.collator.kinds[TOKENS]
        tokens = np.setdiff1d(new.get(TOKENS, before[:0]), before).tolist()
        if not tokens and (meeting := sorted(self._ends.meeting - self._met)):
            return f"begin with a token that others end with, as no example does ({_named(meeting)}; {WAY_OUT})"
        if not tokens:
            return f"have values of columns that no example had ({WAY_OUT})"
        return f"have {counted(len(tokens), 'token')} that no example had ({_named(tokens)}; {WAY_OUT})"

    def _new(self) -> dict[str, np.ndarray]:
        return {name: values for name, values in self._slots.columns().items() if not name.startswith(_SIGN)}

    def _take_for_compared(self, kinds: Mapping[str, np.ndarray]) -> None:
        if kinds:
            self._is_due, self._num_compared, self._met = False, self._num_compared + 1, self._ends.meeting
            self._note(kinds)

    def _note(self, kinds: Mapping[str, np.ndarray]) -> None:
        """Take slots for compared."""
        if kinds:
            self._add(kinds)
        self._slots.forget()

    def _add_ends(self, columns: Mapping[str, np.ndarray]) -> None:
        borders = self._prepared.collator.borders
        if borders and borders[0].keys() <= columns.keys() and len(columns[TOKENS]):
            self._ends.add({name: np.asarray(columns[name]) for name in borders[0]}, (0, len(columns[TOKENS])))

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


def _named(tokens: list[int]) -> str:
    return ", ".join(map(str, tokens[:MOST_NAMED])) + (", ..." if len(tokens) > MOST_NAMED else "")


def _signs(values: np.ndarray) -> np.ndarray:
    """1, 0 or -1 for each value; numbers without a sign, and booleans, have none below 0."""
    return (values > 0).astype(np.int64) - (values < 0)
