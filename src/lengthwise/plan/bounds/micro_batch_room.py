"""How much work a pipeline can do by a deadline at most, beside the overhead of its micro-batches.

A pipeline of micro-batches that take P seconds a stage together, each of them c before its first token, does P - c V of
work. Few micro-batches leave stages idle, many have much overhead: whichever number it is, P times the entry of
``least_ends`` for it is no more than the deadline T. What the longest micro-batch takes alone is a part of that.

Pipelines in slices run their passes slice by slice, and a slice has its c. Few slices leave stages idle while these
fill and drain (``filling_and_draining``).

Every slice, of c or more, is waited for alone as well: of a micro-batch of p seconds in s slices, (1 + (S - 1) / s) p
is at most T, so s is at least (S - 1) p / (T - p), and 1; either way its overhead s c is no less than S c / T of p.

S stages, V micro-batches, G groups of schemes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.plan.bounds.filling_and_draining import ends_of_slices
from lengthwise.plan.bounds.least_ends import COUNTS, least_ends
from lengthwise.plan.space.candidate import Candidate, lengths_up_to

NUMBERS = *range(1, 65), *range(68, 129, 4), *range(144, 257, 16)
"""Micro-batches, or slices, of a pipeline, that are looked at; of a number in between, stages idle as of the next."""
FEWEST = np.array([1, *(number + 1 for number in NUMBERS)])
"""The fewest that idle as of each of these, and beyond the last."""


MARGIN = 1e-9
"""Relative margin of sums of floats, on the side that keeps bounds valid."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchRoom:
    """The room of pipelines of G groups of schemes."""

    overheads_s: np.ndarray
    """[G] seconds of a micro-batch, or of one of its slices, before its first token."""
    alone_stages: np.ndarray
    """[G] how many times its seconds per stage a micro-batch takes alone at least; of one in slices, a slice."""
    later: np.ndarray
    """[G] how many times those of the longest one a pipeline idles at least."""
    last: np.ndarray
    """[G] how many times the overhead of a slice it idles besides."""
    ends: np.ndarray
    """[G, len(NUMBERS)] how many times the seconds that it computes it takes at least."""
    slices: np.ndarray
    """[G] of the longest micro-batch."""
    stages: np.ndarray
    """[G]"""
    is_whole: np.ndarray
    """[G] whether backwards are whole."""
    least_forwards: np.ndarray
    """[G] how many times its forward's seconds a micro-batch takes at least."""
    most_forwards: np.ndarray
    """[G] and at most."""

    @staticmethod
    def of(
        groups: Sequence[Sequence[Candidate]], later: Sequence[float], *, has_overhead: bool = True
    ) -> "MicroBatchRoom":
        """The room of candidates alike in devices, stages, slices, and whether backwards are split.

        Args:
            groups: [G] candidates that pipelines run as, and those that are as fast as any of them.
            later: [G] how many times the seconds of its longest micro-batch a pipeline idles at least.
            has_overhead: whether micro-batches have any; if not, that of sequences is part of their work.
        """
        firsts = [members[0] for members in groups]
        is_sliced = np.array([candidate.scheme.slices > 1 for candidate in firsts])
        alone = [min(c.num_stages if c.scheme.slices > 1 else c.alone_stages for c in members) for members in groups]
        last = [(c.num_stages - 1) * (1 - 1 / min(k.forwards for k in members)) for c, members in zip(firsts, groups)]
        overheads_s = np.array([min(c.overhead_s / c.scheme.slices for c in members) for members in groups])
        is_whole = np.array([not candidate.scheme.zero_bubble for candidate in firsts])
        forwards = [[candidate.forwards for candidate in members] for members in groups]
        return MicroBatchRoom(
            overheads_s=overheads_s * has_overhead,
            alone_stages=np.array(alone),
            later=np.array(later),
            last=np.where(is_sliced & is_whole, last, 0.0),
            ends=np.array([_ends(members) for members in groups]),
            slices=np.array([candidate.scheme.slices for candidate in firsts]),
            stages=np.array([candidate.num_stages for candidate in firsts]),
            is_whole=is_whole,
            least_forwards=np.array([min(of_group) for of_group in forwards]),
            most_forwards=np.array([max(of_group) for of_group in forwards]),
        )

    @property
    def limits(self) -> tuple[np.ndarray, ...]:
        """[G] or [G, ...] figures, of which smaller ones leave more room."""
        most_slices = np.column_stack([self.slices, -self.slices])
        return self.overheads_s, self.alone_stages, self.later, self.last, self.ends, most_slices

    @property
    def limits_of_passes(self) -> tuple[np.ndarray, ...]:
        """[G] figures, of which smaller ones leave more room, where pipelines fill and drain."""
        return self.stages, self.is_whole, self.least_forwards, -self.most_forwards

    def under(self, groups: np.ndarray) -> "MicroBatchRoom":
        """The room of some groups alone, given by their numbers."""
        return MicroBatchRoom(**{name: values[groups] for name, values in vars(self).items()})

    def work_s(self, time_s: float, longest_s: np.ndarray) -> np.ndarray:
        """[G, C] the most seconds of work per stage by a deadline, where the longest sequence takes ``longest_s``.

        Negative where there is no time for that.
        """
        overhead_s = self.overheads_s[:, None]
        left_s = time_s - (self.last * self.overheads_s)[:, None]
        busy_s = time_s / np.append(self.ends, np.ones((len(self.ends), 1)), axis=1)
        most_s = np.max(busy_s - overhead_s * FEWEST, axis=1, keepdims=True)
        beside_s = left_s - self.later[:, None] * (longest_s + np.where(self.slices[:, None] > 1, 0.0, overhead_s))
        share = 1 - (self.alone_stages * self.overheads_s / time_s)[:, None]
        return np.minimum(most_s, beside_s * share)

    def busy_s(self, time_s: float, group: int) -> float:
        """The most seconds that a pipeline of a group computes by a deadline, less the overhead of what comes beside
        the longest micro-batch.
        """
        fewest = np.maximum(FEWEST, self.slices[group])
        upto = np.array([*NUMBERS, np.inf])
        busy_s = time_s / np.append(self.ends[group], 1.0) - self.overheads_s[group] * (fewest - self.slices[group])
        return float(busy_s[upto >= self.slices[group]].max())


def _ends(members: Sequence[Candidate]) -> np.ndarray:
    """[len(NUMBERS)] of one group."""
    scheme, forwards = members[0].scheme, [candidate.forwards for candidate in members]
    if scheme.num_stages == 1:
        return np.ones(len(NUMBERS))
    if scheme.slices > 1:
        is_whole = not scheme.zero_bubble
        return ends_of_slices(scheme.num_stages, min(forwards), max(forwards), NUMBERS, is_whole=is_whole)
    weights = max(map(_weight_share, members)) if scheme.zero_bubble else 0.0
    ends = np.append(least_ends(scheme.num_stages, (min(forwards), max(forwards)), weights), 1.0)
    of_next: np.ndarray = ends[np.searchsorted(COUNTS, NUMBERS)]
    return of_next


def _weight_share(candidate: Candidate) -> float:
    """The most of any sequence's seconds that gradients of weights take."""
    lengths = lengths_up_to(candidate.max_tokens)
    return float((candidate.weight_times_s(lengths) / candidate.times_s(lengths)).max())
