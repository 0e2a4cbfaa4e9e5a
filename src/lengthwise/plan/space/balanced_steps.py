"""What typical steps would take if their work could be balanced over all devices: a quick estimate, without plans.

A pipeline of S stages whose longest sequence takes x does work of about T - (S - 1) x within a step of T seconds, so a
sequence of work w takes N w / (T - (S - 1) w) of the cluster's devices where it runs as a candidate of N devices. Of a
mix, each sequence runs as the candidate under which that is least, and T is the time in which they all need as many
devices as there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.plan.space.candidate import Candidate

CLASSES = 64
"""Classes of length, each half as long again as the one before at most."""
STEPS = 8
"""Typical steps that are looked at."""
OCTAVES = 6
"""Lengths of the made-up step, where there is no sample: each half of the one before, twice as many of it."""
PRECISION = 2e-4
"""Relative width at which the search for the seconds of a step ends."""
PAYS = 0.005
"""Share of the seconds of typical steps that further candidates have to save."""


Tables = tuple[np.ndarray, np.ndarray]
"""[C] seconds of a stage per sequence, with its share of the overhead, and alone; inf where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """What sequences of C classes take under some candidates, which are G groups of like devices and stages."""

    groups: dict[tuple[int, float], Tables]
    """By devices and stages."""
    equal_s: np.ndarray
    """[P] seconds of each step on the fastest equal pipelines of one candidate; inf where none holds all of it."""

    def merged(self, other: "StepSeconds") -> "StepSeconds":
        """The seconds under these candidates and others."""
        groups = dict(self.groups)
        for key, tables in other.groups.items():
            groups[key] = _least(groups[key], tables) if key in groups else tables
        return StepSeconds(groups=groups, equal_s=np.minimum(self.equal_s, other.equal_s))


class BalancedSteps:
    """Estimates the seconds of typical steps."""

    def __init__(self, samples: Sequence[np.ndarray], *, num_devices: int, longest: int) -> None:
        """``samples``: lengths of typical batches, which count as no longer than ``longest``."""
        halves = [np.full(2**octave, max(1, longest >> octave)) for octave in range(OCTAVES)]
        steps = list(samples)[:: -(-len(samples) // STEPS)] if samples else [np.concatenate(halves)]
        self._num_devices = num_devices
        self._lengths = np.unique([*np.geomspace(1, longest, CLASSES).astype(np.int64), longest])
        classes = [np.searchsorted(self._lengths, np.minimum(lengths, longest)) for lengths in steps]
        self._last = np.array([of_step.max() for of_step in classes])
        self._counts = np.stack([np.bincount(c, minlength=len(self._lengths)) for c in classes]).astype(np.float64)

    def under(self, candidates: Sequence[Candidate]) -> StepSeconds:
        """What the steps' sequences take under candidates."""
        groups: dict[tuple[int, float], Tables] = {}
        equal_s = np.full(len(self._counts), np.inf)
        for candidate in candidates:
            fits, times_s = self._lengths <= candidate.max_tokens, candidate.times_s(self._lengths)
            shared_s = times_s + candidate.overhead_s * self._lengths / candidate.max_tokens
            tables = np.where(fits, shared_s, np.inf), np.where(fits, times_s + candidate.overhead_s, np.inf)
            key = candidate.num_devices, candidate.flow_stages
            groups[key] = _least(groups[key], tables) if key in groups else tables
            if fits.all() and self._num_devices % candidate.num_devices == 0:
                alone_s = tables[1][self._last]
                spread_s = self._counts @ shared_s * candidate.num_devices / self._num_devices
                waiting_s = (candidate.flow_stages - 1) * alone_s
                np.minimum(equal_s, np.maximum(spread_s, alone_s) + waiting_s, out=equal_s)
        return StepSeconds(groups=groups, equal_s=equal_s)

    def mixed_s(self, seconds: StepSeconds) -> np.ndarray:
        """[P] seconds of each step where each sequence runs as whatever is best for it.

        Infinite where the longest fits nowhere.
        """
        nowhere = np.full(len(self._counts), np.inf)
        if not seconds.groups:
            return nowhere
        devices, stages = (np.array(column)[:, None] for column in zip(*seconds.groups))
        work_s, alone_s = (np.stack(column) for column in zip(*seconds.groups.values()))
        fits = np.isfinite(alone_s)
        waiting_s = np.where(fits, stages - 1, 0.0) * np.where(fits, alone_s, 0.0)
        least_s = (alone_s + waiting_s).min(axis=0)
        if least_s[-1] == np.inf:
            return nowhere
        low_s = np.maximum(self._counts @ (devices * work_s).min(axis=0) / self._num_devices, least_s[self._last])
        high_s = low_s.copy()
        while (short := self._needs_more(high_s, devices * work_s, alone_s, waiting_s)).any():
            low_s, high_s = np.where(short, high_s, low_s), np.where(short, 2 * high_s, high_s)
        while (high_s > low_s * (1 + PRECISION)).any():
            middle_s = (low_s + high_s) / 2
            short = self._needs_more(middle_s, devices * work_s, alone_s, waiting_s)
            low_s, high_s = np.where(short, middle_s, low_s), np.where(short, high_s, middle_s)
        return high_s

    def _needs_more(
        self, time_s: np.ndarray, device_s: np.ndarray, alone_s: np.ndarray, waiting_s: np.ndarray
    ) -> np.ndarray:
        """[P] whether each step needs more devices than there are to end in its ``time_s``."""
        left_s = time_s[:, None, None] - waiting_s
        fits = left_s >= alone_s
        needed = np.where(fits, device_s, np.inf) / np.where(fits, left_s, 1.0)
        least = np.minimum(needed.min(axis=1), 2.0 * self._num_devices)
        return np.asarray((least * self._counts).sum(axis=1) > self._num_devices)


def pays(
    others: Sequence[Candidate],
    candidates: Sequence[Candidate],
    *,
    num_devices: int,
    max_length: int,
    samples: Sequence[np.ndarray],
) -> bool:
    """Whether typical steps become faster by at least :data:`PAYS` if ``others`` join ``candidates``: all of them
    together, or each on average, as one with a giant takes longer than many.
    """
    if not others:
        return False
    longest = min(max_length, max(candidate.max_tokens for candidate in (*candidates, *others)))
    steps = BalancedSteps(samples, num_devices=num_devices, longest=longest)
    without = steps.under(candidates)
    with_others = without.merged(steps.under(others))
    mixed_s, equal_s = (
        (steps.mixed_s(without), steps.mixed_s(with_others)),
        (without.equal_s, with_others.equal_s),
    )
    return any(_gain(*step_s) > PAYS for step_s in (mixed_s, equal_s))


def _gain(before_s: np.ndarray, after_s: np.ndarray) -> float:
    """The share of the seconds of all steps, or on average of each, that is saved; 1 where nothing held them before."""
    if not np.isfinite(before_s).all():
        return float(np.isfinite(after_s).sum() > np.isfinite(before_s).sum())
    return 1 - float(min(after_s.sum() / before_s.sum(), (after_s / before_s).mean()))


def _least(tables: Tables, others: Tables) -> Tables:
    return np.minimum(tables[0], others[0]), np.minimum(tables[1], others[1])
