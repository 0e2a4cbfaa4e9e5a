"""For which numbers of slots a model's forward takes the same decisions, found by calling it at few of them.

A forward may branch on its length in Python, and packs have other lengths than sequences. Each call says by what
conditions it went its way (:mod:`lengthwise.runtime.verify.tracked_lengths`); lengths that meet all of them go the same
way, and the next call is at a length that does not.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import monotonic

import numpy as np
import torch

from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.comm.objects import broadcast_json
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import varied
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.longest_check import slots_of_a_forward
from lengthwise.runtime.verify.stock_call import stock_output
from lengthwise.runtime.verify.tracked_lengths import NEAR, Decision, DecisionLog, TrackLengths
from lengthwise.runtime.verify.verdict import NotInThisDtype, NotWithTheseWeights, on_every_rank
from lengthwise.runtime.wrap.context import active

_log = logging.getLogger("lengthwise")

FIRST = 101
"""Slots of the first call, at most: a prime that no weight has as a size."""
MOST_CALLS, MOST_SECONDS = 8, 4.0
"""Calls, and how long they may have taken together when another begins."""
LOOKED = 64
"""Lengths among which one is chosen that no weight has as a size."""
UNKNOWN = -1
"""The way of lengths of which no call tells."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a forward decided at one length, and so at others."""

    num_slots: int
    decisions: tuple[Decision, ...]
    is_whole: bool = True
    """Whether the forward came to its end, so that there are no further decisions."""

    def is_taken(self, lengths: np.ndarray) -> np.ndarray:
        """[L] for each of ``lengths``, whether a forward of so many slots decides the same."""
        is_same = np.ones(len(lengths), dtype=bool)
        with np.errstate(all="ignore"):
            for decision in self.decisions:
                is_same &= np.asarray(decision.formula(lengths), dtype=bool) == decision.outcome
        return is_same | (lengths == self.num_slots)


@dataclass(kw_only=True)
class LengthDecisions:
    """The ways that the stock forward of a model takes, by its number of slots."""

    run: PreparedModel
    ways: list[Way] = field(default_factory=list)
    is_lost: bool = False
    """Whether the forward may decide by its length where that is not seen."""
    _spent_s: float = 0.0

    def ways_of(self, lengths: np.ndarray) -> np.ndarray:
        """[L] the way of each of ``lengths``, by number; -1: not known. Every rank calls this, with the same."""
        while (num_slots := self._next(lengths)) is not None:
            self._call(num_slots)
        return self.known_ways(lengths)

    def known_ways(self, lengths: np.ndarray) -> np.ndarray:
        """[L] the same by the calls that were made; a rank may call it alone."""
        numbers = np.full(len(lengths), UNKNOWN)
        for number, way in reversed(list(enumerate(self.ways))):
            numbers[way.is_taken(lengths)] = number
        return numbers

    def _next(self, lengths: np.ndarray) -> int | None:
        """The length of the next call, the same on every rank; None: there is none."""
        chosen = None
        if not self.ways:
            chosen = self._first(int(lengths.max()))
        elif len(self.ways) < MOST_CALLS and self._spent_s < MOST_SECONDS:
            unknown = lengths[self.known_ways(lengths) == UNKNOWN]
            unknown = unknown[(unknown > 1) & (unknown <= slots_of_a_forward(self.run))]
            chosen = next(filter(self._is_told_apart, unknown[:LOOKED].tolist()), None)
            chosen = int(unknown[0]) if chosen is None and len(unknown) else chosen
        number: int | None = broadcast_json(self.run.world, chosen)
        return number

    def _first(self, longest: int) -> int:
        limit = min(FIRST, longest, self.run.collator.longest or FIRST)
        primes = [n for n in range(limit, 1, -1) if all(n % divisor for divisor in range(2, n))]
        return next(filter(self._is_told_apart, primes), max(2, limit))

    def _is_told_apart(self, num_slots: int) -> bool:
        """Whether no weight has a size that would be taken for so many slots."""
        return not any(size % num_slots == 0 or abs(size - num_slots) <= NEAR for size in self._sizes)

    @cached_property
    def _sizes(self) -> set[int]:
        return {size for tensor in self.run.wrapped_model.structure.constants() for size in tensor.shape if size}

    def _call(self, num_slots: int) -> None:
        """Call the stock forward on one sequence, and keep the way that it takes, as far as it comes."""
        log, begun_s, is_whole = DecisionLog(num_slots=num_slots), monotonic(), True
        try:
            with noise_free(self.run), varied(self.run, (num_slots,)), torch.no_grad(), self.run.gathered():
                on_every_rank(self.run, partial(_call_tracked, self.run, log), is_stock=True)
        except (LengthwiseError, NotInThisDtype, NotWithTheseWeights) as error:
            _log.debug("a forward of %s slots says little of what it decides: %s", f"{num_slots:,}", error)
            is_whole = False
        finally:
            log.is_open, self._spent_s = False, self._spent_s + monotonic() - begun_s
        self.is_lost |= log.is_lost or not is_whole
        decisions = tuple(_evaluable(log.decisions.values()))
        self.is_lost |= len(decisions) < len(log.decisions)
        self.ways.append(Way(num_slots=num_slots, decisions=decisions, is_whole=is_whole))


def _call_tracked(run: PreparedModel, log: DecisionLog) -> None:
    """Call the stock forward and the user's function for its loss, in which sizes are tracked."""
    output, micro_batch = stock_output(run, (log.num_slots,), 0, around=partial(TrackLengths, log))
    if run.wrapped_model.has_own_loss:
        with active(micro_batch.shard), TrackLengths(log):
            run.wrapped_model.loss_of(output, micro_batch)


def _evaluable(decisions: Iterable[Decision]) -> Iterable[Decision]:
    """Leave out the decisions whose formula cannot be computed for other lengths."""
    for decision in decisions:
        try:
            with np.errstate(all="ignore"):
                np.asarray(decision.formula(np.arange(1, 4)), dtype=bool)
        except (TypeError, ValueError, OverflowError, ZeroDivisionError):
            continue
        yield decision
