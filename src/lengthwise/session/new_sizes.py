"""Sizes that only items of a loop have: sequences at whose length a forward decides otherwise, and larger packs.

The examples of ``prepare`` may be few and short. What a forward does beyond the slots of all of them together, no pack
that was compared has shown.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.lengths import LengthIndex
from lengthwise.runtime.comm.objects import gather_json
from lengthwise.runtime.loop.brought_items import TOKENS, SequenceColumns
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.session.new_kinds import WAY_OUT
from lengthwise.session.pack_limit import largest_pack

MORE = 2
"""How many times the slots of a step are compared, so that steps which grow are seldom compared."""
MOST_NAMED = 4
"""Lengths that a message names."""


class NewSizes:
    """Knows the lengths of the sequences that packs were compared for, and how many slots they had together."""

    def __init__(self, prepared: PreparedModel, options: PrepareOptions, lengths: LengthIndex) -> None:
        self._prepared, self._options = prepared, options
        self.lengths = np.unique(np.asarray(lengths.lengths) // options.slot_tokens)
        """[L] in slots."""
        self.num_slots = int(lengths.num_tokens) // options.slot_tokens
        self._new_lengths, self._new_slots = set[int](), 0

    def changes(self, sequences: Iterable[SequenceColumns]) -> dict[str, str]:
        """What packs are to be compared with again, in words: sizes of these sequences, and of others before them."""
        brought = [len(columns[TOKENS]) // self._options.slot_tokens for columns in sequences if TOKENS in columns]
        if self._prepared.wrapped_model.by_sequence is not None or not brought:
            return {}
        lengths, decides_anew = np.setdiff1d(brought, self.lengths), self._prepared.decides_anew
        if decides_anew is not None and len(lengths):
            self._new_lengths |= set(lengths[decides_anew(lengths)].tolist())
        num_slots = sum(brought) * self._prepared.world.size  # a pack may have sequences of all ranks
        if self._largest(num_slots) > self._largest(self.num_slots):
            self._new_slots = max(self._new_slots, num_slots)
        return {"sequences": self._in_words()} if self._new_lengths or self._new_slots else {}

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Within, the sizes are those on all ranks; whether packs may be larger than before. Every rank enters it."""
        before = self.lengths, self.num_slots
        parts = gather_json(self._prepared.world, [sorted(self._new_lengths), self._new_slots])
        lengths = [np.array(new, dtype=self.lengths.dtype) for new, _ in parts]
        self.lengths = np.unique(np.concatenate([self.lengths, *lengths]))
        self.num_slots = max(self.num_slots, *(MORE * num_slots for _, num_slots in parts))
        try:
            yield self.num_slots > before[1]
        except InfeasibleError:  # nor is there memory at the next step
            self._new_lengths, self._new_slots = set(), 0
            raise
        except BaseException:
            self.lengths, self.num_slots = before
            raise
        self._new_lengths, self._new_slots = set(), 0

    def _largest(self, num_slots: int) -> int:
        return largest_pack(self._prepared, self._options, num_slots)

    def _in_words(self) -> str:
        size = self._options.slot_tokens
        if not self._new_lengths:
            return (
                f"of a step may make packs of {self._new_slots * size:,} tokens, and all examples together had "
                f"{self.num_slots * size:,} ({WAY_OUT})"
            )
        lengths = sorted(self._new_lengths)
        named = ", ".join(f"{length * size:,}" for length in lengths[:MOST_NAMED])
        return (
            f"have lengths at which the forward decides otherwise than at those of any example "
            f"({named + (', ...' if len(lengths) > MOST_NAMED else '')}; {WAY_OUT})"
        )
