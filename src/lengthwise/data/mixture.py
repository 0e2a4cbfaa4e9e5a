"""Several corpora as one: how often an epoch passes each, counted exactly, and which of its sequences that takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError, Setting
from lengthwise.data.rng import epoch_order

MAX_IN_EPOCH = 1 << 30
"""Sequences of an epoch that repeats corpora; its order is kept in memory."""
_PARTS = 1 << 32
"""Number of the first part's stream of random numbers; those of epochs are below."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Which sequences an epoch holds, of parts whose ids are laid end to end; a ``Selection`` of the sampler.

    Each part is passed over and over, every pass a new random order of its sequences. Epoch e takes the part's next
    floor((e + 1) r n) - floor(e r n) sequences, of n at ``repeats`` r, going on where the epoch before stopped: after
    any number of epochs, no sequence of a part was taken more than once oftener than another.
    """

    sizes: tuple[int, ...]
    """Sequences of each part."""
    repeats: tuple[Fraction, ...]
    """Passes over each part in an epoch."""
    seed: int

    def __post_init__(self) -> None:
        if not any(self.taken(part, 1) for part in range(len(self.sizes))):
            words = ", ".join(f"{float(r):g} of {n:,}" for r, n in zip(self.repeats, self.sizes))
            raise InputError(
                f"an epoch of the mixture would hold no sequence ({words}); raise repeat until it is one of some part"
            )
        in_epoch = sum(self.taken(part, 1) for part in range(len(self.sizes)))
        if in_epoch > max(MAX_IN_EPOCH, 2 * sum(self.sizes)):
            words = ", ".join(f"{float(r):g} of {n:,}" for r, n in zip(self.repeats, self.sizes))
            raise InputError(
                f"an epoch of the mixture would hold {in_epoch:,} sequences ({words}); lower repeat, or bring the "
                f"shares nearer to one another, until it holds at most {MAX_IN_EPOCH:,}"
            )

    def ids(self, epoch: int) -> np.ndarray:
        """Ids of the sequences of epoch ``epoch``, ascending; one that it holds twice is there twice."""
        chosen, first = [], 0
        for part, size in enumerate(self.sizes):
            chosen.append(first + self._take(part, self.taken(part, epoch), self.taken(part, epoch + 1)))
            first += size
        return np.concatenate(chosen)

    def taken(self, part: int, num_epochs: int) -> int:
        """Sequences of ``part`` that so many epochs hold."""
        return num_epochs * self.repeats[part] * self.sizes[part] // 1

    def tokens_taken(self, part: int, num_epochs: int, lengths: np.ndarray) -> int:
        """Their tokens, where ``lengths`` are those of the part's sequences."""
        passes, more = divmod(self.taken(part, num_epochs), self.sizes[part])
        rest = int(lengths[self._pass(part, passes)[:more]].sum(dtype=np.int64)) if more else 0
        return passes * int(lengths.sum(dtype=np.int64)) + rest

    def to_json(self) -> dict[str, Any]:
        """Plain values that identify the mixture."""
        return {"name": "mixture", "sizes": list(self.sizes), "repeats": [str(repeat) for repeat in self.repeats]}

    def _take(self, part: int, start: int, stop: int) -> np.ndarray:
        """The sequences from place ``start`` to ``stop`` in the part's passes, one behind the other, ascending."""
        size = self.sizes[part]
        pieces = [np.empty(0, dtype=np.int64)]
        while start < stop:
            number, position = divmod(start, size)
            end = min(size, position + stop - start)
            pieces.append(np.arange(size) if end - position == size else self._pass(part, number)[position:end])
            start += end - position
        return np.sort(np.concatenate(pieces), kind="stable")

    def _pass(self, part: int, number: int) -> np.ndarray:
        """The random order of a pass over ``part``."""
        return epoch_order(self.sizes[part], seed=self.seed, epoch=number, number=_PARTS + part)


def solve_repeats(
    names: Sequence[str], *, repeats: Sequence[float | None], shares: Sequence[float | None], num_tokens: Sequence[int]
) -> tuple[Fraction, ...]:
    """Passes over each part in an epoch: as given, else 1; or those whose tokens are as ``shares``.

    Of shares, an epoch is the shortest one that passes every part at least once.

    Raises:
        InputError: a part has both, or some parts have a share and others none.
    """
    for name, repeat, share in zip(names, repeats, shares):
        if repeat is not None and share is not None:
            raise InputError(
                f"part {name} of {Setting.MIXTURE} has repeat {repeat:g} and share {share:g}; leave one out"
            )
    without = [name for name, share in zip(names, shares) if share is None]
    if len(without) == len(names):
        return tuple(Fraction(1) if repeat is None else _exactly(repeat) for repeat in repeats)
    if without:
        named = next(name for name in names if name not in without)
        raise InputError(
            f"part {named} of {Setting.MIXTURE} has a share and part {without[0]} has none; give every part a "
            "share, or none"
        )
    weights = [_exactly(share) / tokens for share, tokens in zip(shares, num_tokens) if share is not None]
    return tuple(weight / min(weights) for weight in weights)


def _exactly(number: float) -> Fraction:
    """The number as it is written: 0.3 is 3/10."""
    return Fraction(repr(number))
