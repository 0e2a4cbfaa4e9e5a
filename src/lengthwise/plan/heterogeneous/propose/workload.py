"""The workload of proposals: sequences of each step per class of length, and what each candidate takes for them.

S steps, K candidates, C classes of length, the longest first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate
from lengthwise.plan.heterogeneous.propose.planned import pack_tokens_of
from lengthwise.plan.space.problem import PlanningProblem

EXACT_CLASSES = 48
"""Up to this many different lengths, each is a class of its own."""
LONG_RATIO, LONG_OCTAVES = 0.93, 3
"""Lengths within this ratio make a class, in the octaves below the longest."""
SHORT_RATIO = 0.72
"""The same for the others, which matter only by their sum."""
TINY_S = 1e-12
"""Seconds that are less than any sequence takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Steps of a run and the candidates they may use."""

    candidates: tuple[ProposedCandidate, ...]
    num_devices: int
    counts: np.ndarray
    """[S, C] sequences of each class in each step."""
    lengths: np.ndarray
    """[C] mean tokens of a sequence of each class."""
    longest: np.ndarray
    """[C] tokens of its longest sequence, decreasing."""
    work_s: np.ndarray
    """[K, C] seconds per stage that a sequence adds to a micro-batch; inf where it does not fit."""
    setup_s: np.ndarray
    """[K] seconds per stage of a micro-batch before its first sequence; 0 if sequences are charged instead."""
    pack_tokens: np.ndarray
    """[K] most tokens of a micro-batch of several sequences."""
    util_tokens: np.ndarray
    """[K] mean tokens of a micro-batch below which more of them are not made."""
    update_s: np.ndarray
    """[K] seconds of a step outside its micro-batches, if all pipelines were of the candidate."""

    def part(self, steps: Sequence[int]) -> "Workload":
        """Only some of the steps."""
        return replace(self, counts=self.counts[list(steps)])

    @cached_property
    def devices(self) -> np.ndarray:
        """[K] devices of a pipeline."""
        return np.array([candidate.num_devices for candidate in self.candidates])

    @cached_property
    def stages(self) -> np.ndarray:
        """[K] stages of a pipeline, as a flow shop has them that takes about as long."""
        return np.array([candidate.flow_stages for candidate in self.candidates])

    @cached_property
    def limits(self) -> np.ndarray:
        """[K] longest sequence a pipeline holds."""
        return np.array([candidate.max_tokens for candidate in self.candidates])

    @cached_property
    def charged_s(self) -> np.ndarray:
        """[K, C] ``work_s`` and the overhead of the part of a full micro-batch that a sequence takes, at least."""
        return self.work_s + self.setup_s[:, None] * self.lengths / np.maximum(self.pack_tokens[:, None], self.lengths)

    @cached_property
    def alone_s(self) -> np.ndarray:
        """[K, C] seconds of a sequence alone on a pipeline, whose stages cannot share it."""
        return (self.work_s + self.setup_s[:, None]) * self.stages[:, None]

    @cached_property
    def mean(self) -> np.ndarray:
        """[C] sequences of each class in the average step."""
        return self.counts.mean(axis=0)

    def floors_s(self, used: np.ndarray | None = None) -> np.ndarray:
        """[S] seconds that a step takes at least, its update left out: Eq. (4) with fractional counts, and its longest
        sequence alone. With all candidates, or only those that are ``used`` [K]; inf where a sequence fits on none.
        """
        used = np.ones(len(self.candidates), dtype=bool) if used is None else used
        device_s = (self.devices[used, None] * self.charged_s[used]).min(axis=0)
        even_s = self.counts @ np.where(np.isfinite(device_s), device_s, 0.0) / self.num_devices
        alone_s = np.where(self.counts > 0, self.alone_s[used].min(axis=0), 0.0).max(axis=1)
        return np.maximum(even_s, alone_s)


def make_workload(
    problem: PlanningProblem, candidates: Sequence[ProposedCandidate], samples: Sequence[np.ndarray]
) -> Workload:
    """Sort the sequences of ``samples`` into classes and price one of each class under every candidate.

    No class is cut by what a candidate holds, so a candidate holds all of a class or nothing of it.
    """
    lengths, where = np.unique(np.concatenate(samples), return_inverse=True)
    steps = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])
    ends = _class_ends(lengths, [candidate.max_tokens for candidate in candidates])
    counts = np.zeros((len(samples), len(ends)))
    classes = np.searchsorted(ends, lengths)
    np.add.at(counts, (steps, classes[where]), 1.0)
    totals = np.bincount(classes[where], minlength=len(ends))
    means = np.bincount(classes[where], weights=lengths[where], minlength=len(ends)) / totals
    means, ends, counts = means[::-1], ends[::-1], counts[:, ::-1]
    overheads_s = np.array([candidate.overhead_s for candidate in candidates])
    work_s = np.stack(
        [np.asarray(candidate.times_s(np.rint(means).astype(np.int64)), dtype=np.float64) for candidate in candidates]
    )
    fits, per_sequence = ends <= np.array([[k.max_tokens] for k in candidates]), problem.overhead_per_sequence
    if not per_sequence:
        overheads_s, work_s = _by_slices(candidates, overheads_s, work_s, fits)
    work_s[~fits] = np.inf
    return Workload(
        candidates=tuple(candidates),
        num_devices=problem.num_devices,
        counts=counts,
        lengths=means,
        longest=ends,
        work_s=work_s + overheads_s[:, None] * per_sequence,
        setup_s=overheads_s * (not per_sequence),
        pack_tokens=np.array([pack_tokens_of(candidate) for candidate in candidates]),
        util_tokens=np.array([candidate.cost.util_tokens(candidate.scheme) for candidate in candidates]),
        update_s=np.array([candidate.update_s for candidate in candidates]),
    )


def _by_slices(
    candidates: Sequence[ProposedCandidate], overheads_s: np.ndarray, work_s: np.ndarray, fits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[K] overheads and [K, C] work, those of a micro-batch in slices where packs have as many as their work needs.

    Each has one slice, and the others in proportion: all of the scheme where it takes as long as the longest sequence
    that fits.
    """
    slices = np.array([candidate.scheme.slices for candidate in candidates])
    longest_s = np.where(fits, work_s, 0.0).max(axis=1, keepdims=True, initial=TINY_S)
    more_s = (overheads_s - overheads_s / slices)[:, None] * work_s / longest_s
    return overheads_s / slices, work_s + more_s


def _class_ends(lengths: np.ndarray, limits: Sequence[int]) -> np.ndarray:
    """The longest length of each class, increasing; ``lengths`` are unique and increase."""
    if len(lengths) <= EXACT_CLASSES:
        return lengths
    longest = float(lengths[-1])
    long = longest * LONG_RATIO ** np.arange(np.ceil(LONG_OCTAVES * np.log(2) / -np.log(LONG_RATIO)))
    num_short = max(0.0, np.ceil(np.log(long[-1] / lengths[0]) / -np.log(SHORT_RATIO)))
    bounds = np.concatenate([long, long[-1] * SHORT_RATIO ** np.arange(1, num_short + 1), np.asarray(limits)])
    last = np.searchsorted(lengths, np.unique(np.minimum(bounds, longest)), side="right") - 1
    return lengths[np.unique(last[last >= 0])]
