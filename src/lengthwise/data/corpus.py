"""The sequences of a run: an index seen through its length rule."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.config import DataConfig
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.rules import Ledger, View, apply_max_length
from lengthwise.data.store import TokenStore, open_index


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Token ids by sequence id, after the length rule."""

    store: TokenStore
    view: View

    def __len__(self) -> int:
        return len(self.view.lengths)

    @property
    def lengths(self) -> LengthIndex:
        """Length of every sequence; what sampler and planner work on."""
        return self.view.lengths

    @property
    def ledger(self) -> Ledger:
        """What the length rule did."""
        return self.view.ledger

    @property
    def digest(self) -> str:
        """Sixteen hex digits over the index, the rule and its limit."""
        return self.view.lengths.digest

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.store.vocab_size

    def tokens(self, id: int) -> np.ndarray:
        """[length] unsigned integers: a read-only view of the file."""
        if not 0 <= id < len(self):
            raise InputError(f"no sequence {id} in this corpus: it has {len(self):,}, counted from 0")
        start = int(self.view.starts[id])
        return self.store.tokens(int(self.view.base_ids[id]))[start : start + int(self.lengths.lengths[id])]


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus a configuration's ``data`` section describes.

    Raises:
        InputError: there is no usable index, or its lengths break the rule.
    """
    if not config.index:
        raise InputError("data.index is not set; make an index with `lengthwise index` and give its folder")
    store = open_index(config.index)
    view = apply_max_length(store.lengths, max_length=config.max_length, rule=config.over_length)
    return Corpus(store=store, view=view)
