"""Sequence id -> length in tokens: all of a corpus that planning reads."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief

MOST_TOKENS = 1 << 40
"""Tokens of the longest sequence; a number above is no length."""
MOST_TOTAL = 1 << 56
"""Tokens of a corpus."""


def read_lengths(given: Any) -> "LengthIndex":
    """Lengths from an array, a list, or what else numpy makes one of.

    Raises:
        InputError: there are none, or they are not one row of whole numbers from 1.
    """
    try:
        lengths = np.asarray(given)
    except ValueError:
        raise InputError("lengths are rows of different sizes; pass one number of tokens per sequence") from None
    if not lengths.size:
        raise InputError("lengths is empty; pass one number of tokens per sequence")
    return LengthIndex(lengths=lengths)


def read_targets(targets: Any, num_items: int) -> np.ndarray:
    """[num_items] how many tokens of each item have a loss, from an array or a list.

    Raises:
        InputError: they are not one whole number from 0 for each, or nothing has a loss.
    """
    try:
        counts = np.asarray(targets)
    except ValueError:  # rows of different sizes
        counts = np.empty((0, 0))
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise InputError(
            f"targets={brief(targets)}: give one whole number for each of {num_items:,} items, its tokens with a loss"
        )
    if len(counts) != num_items:
        raise InputError(f"{len(counts):,} numbers of targets for {num_items:,} items; give one each")
    if (fewest := int(counts.min())) < 0:
        raise InputError(f"item {int(np.argmin(counts))} has {fewest:,} targets; give 0 or more")
    if not counts.any():
        raise InputError("targets are 0 for every item, so nothing would be learned; leave targets out")
    return counts


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthIndex:
    """The lengths of a corpus, possibly memory-mapped, tied to its text by a digest."""

    lengths: np.ndarray
    """[num_sequences] integers, tokens per sequence; read-only."""
    corpus_digest: str = ""
    """Digest of the tokens themselves; empty when only lengths are known."""
    targets: np.ndarray | None = None
    """[num_sequences] tokens that have a loss; None: those that the model's objective says."""
    attention_lengths: np.ndarray | None = None
    """[num_sequences] as in ``GlobalBatch``; None: those of ordinary sequences."""
    numbers: np.ndarray | None = None
    """[num_sequences] the number that each sequence has for the user, such as of its item; None: its place here."""

    def __post_init__(self) -> None:
        if not self.lengths.size:
            raise InputError("the corpus is empty: no sequence to train on; check the source path and its file types")
        if self.lengths.ndim != 1 or not np.issubdtype(self.lengths.dtype, np.integer):
            raise InputError(
                f"lengths must be one row of integers, not {self.lengths.dtype} of shape {self.lengths.shape}; "
                "pass one number of tokens per sequence"
            )
        if (shortest := int(self.lengths.min())) < 1:
            where = int(np.argmax(self.lengths < 1))
            raise InputError(
                f"sequence {where} has length {shortest}; every sequence needs at least 1 token: "
                "remove it (lengthwise index has --on-empty drop)"
            )
        if (longest := int(self.lengths.max())) > MOST_TOKENS:
            raise InputError(
                f"sequence {int(np.argmax(self.lengths))} has length {longest:,}; more than {MOST_TOKENS:,} tokens are "
                "no sequence: check that the numbers are lengths in tokens"
            )
        if float(self.lengths.sum(dtype=np.float64)) > MOST_TOTAL:
            raise InputError(
                f"the lengths add up to more than {MOST_TOTAL:,} tokens: check that the numbers are lengths in tokens"
            )
        view = self.lengths.view()
        view.flags.writeable = False
        object.__setattr__(self, "lengths", view)

    def __len__(self) -> int:
        return len(self.lengths)

    def number_of(self, place: int) -> int:
        """The number that the sequence at ``place`` has for the user."""
        return place if self.numbers is None else int(self.numbers[place])

    def select(self, ids: np.ndarray) -> "LengthIndex":
        """The sequences ``ids`` as lengths of their own."""
        return LengthIndex(
            lengths=self.lengths[ids],
            targets=None if self.targets is None else self.targets[ids],
            attention_lengths=None if self.attention_lengths is None else self.attention_lengths[ids],
        )

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over the lengths and the corpus digest; reads every length once."""
        state = hashlib.blake2b(self.corpus_digest.encode(), digest_size=8)
        for start in range(0, len(self.lengths), 1 << 20):
            state.update(self.lengths[start : start + (1 << 20)].astype("<i8").tobytes())
        return state.hexdigest()
