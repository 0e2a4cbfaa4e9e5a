"""What sets of whole sequences pipelines can compute within a phase, and the most that such a set is worth.

A column is a pipeline of a group of schemes with the sequences that it computes by the end D of its phase. Two rules
say which may: with a share of the overhead of their micro-batches in every sequence's seconds, all of them fit into
what the bubble of the longest leaves of D (``SequenceCosts``); and without, into what micro-batches of some number
leave (``MicroBatchRoom``) and what idles while the pipeline fills and drains (``filling_and_draining``). Given a value
for each sequence, the most valuable column of a group whose longest sequence is given is a knapsack. Seconds of large
sequences are rounded down to cells of D, and small sequences may be cut, so that no column is worth more than what is
found; of the two rules the one counts under which that is less.

G groups of schemes, C classes of length, the longest last.
"""

from typing import NamedTuple

import numpy as np

from lengthwise.plan.bounds.filling_and_draining import most_beside_s
from lengthwise.plan.bounds.step_sequences import StepSequences

CELLS = 400
"""Of a phase, to which seconds are rounded down."""
SMALL = 1 / 40
"""Share of a phase up to which sequences may be cut."""
MOST_LARGE = round(1 / SMALL)
"""Larger ones that fit into a phase."""
LONG = 0.1
"""Share of a phase from which on what idles beside the longest sequence is looked at."""
MOST_COLUMNS = 10
"""That are given at once."""
ROUNDING = 1e-7
"""Share of a phase that sums of floats may be off."""


class FittingRule(NamedTuple):
    """One of the rules: seconds that sequences take, and that there are beside the longest one."""

    work_s: np.ndarray
    """[G, C]"""
    beside_s: np.ndarray
    """[G, C] beside one whose longest sequence is of a class; negative where it does not fit."""


class PipelineColumn(NamedTuple):
    """A pipeline and what it computes."""

    group: int
    counts: np.ndarray
    """[C] sequences of each class; of small ones maybe a part."""


class PhaseColumns:
    """The columns of a phase of ``time_s`` seconds."""

    def __init__(self, sequences: StepSequences, time_s: float) -> None:
        self.time_s, self.counts = time_s, sequences.counts
        rules = _rules(sequences, time_s)
        fits = np.logical_and.reduce([rule.beside_s >= 0 for rule in rules])
        groups = _undominated(sequences.devices, fits, rules)
        self.devices = sequences.devices[groups].astype(np.float64)
        """[G] of a pipeline; groups that hold no sequence, or than which another is no worse, are left out."""
        self.fits = fits[groups]
        """[G, C] whether a pipeline may have a sequence as its longest."""
        self._rules = [FittingRule(rule.work_s[groups], rule.beside_s[groups]) for rule in rules]

    def dearest(self, values: np.ndarray) -> tuple[float, list[PipelineColumn]]:
        """The most that a column is worth per device, and the dearest columns of the groups where they are dearest.

        Args:
            values: [C] of a sequence.
        """
        if not len(self.devices):
            return 0.0, []
        worths = np.stack([self._worths(rule, values) for rule in self._rules])
        worth = np.where(self.fits, worths.min(axis=0), 0.0)
        longest, binding = worth.argmax(axis=1), worths.argmin(axis=0)
        per_device = worth.max(axis=1) / self.devices
        order = np.argsort(-per_device, kind="stable")[:MOST_COLUMNS]
        columns = [
            PipelineColumn(
                group, self._column(group, int(longest[group]), self._rules[binding[group, longest[group]]], values)
            )
            for group in order.tolist()
            if per_device[group] > 0
        ]
        return float(per_device.max()), columns

    def alone(self) -> list[PipelineColumn]:
        """For each class that fits, the smallest pipeline that holds one sequence."""
        columns = []
        for place in np.flatnonzero(self.fits.any(axis=0)).tolist():
            groups = np.flatnonzero(self.fits[:, place])
            columns.append(PipelineColumn(int(groups[self.devices[groups].argmin()]), np.eye(len(self.counts))[place]))
        return columns

    def _worths(self, rule: FittingRule, values: np.ndarray) -> np.ndarray:
        """[G, C] the most that columns are worth under one rule, by their longest sequence."""
        num_groups, cell_s = len(self.devices), self.time_s / CELLS
        cells = np.arange(CELLS + 1)
        small, of_small = rule.work_s < SMALL * self.time_s, self._small_worths(rule, values)
        best = np.zeros((num_groups, CELLS + 1))
        worths = np.zeros((num_groups, len(values)))
        taken = np.minimum(np.floor(rule.work_s / cell_s + 1e-9), CELLS + 1).astype(int)
        beside = np.minimum(np.floor(np.maximum(rule.beside_s, 0.0) / cell_s), CELLS).astype(int)
        for place, count in enumerate(self.counts.astype(int).tolist()):
            is_large = ~small[:, place]
            room = beside[:, place, None] - cells
            if not is_large.any():
                worths[:, place] = values[place] + of_small[np.arange(num_groups), beside[:, place]]
                continue
            fitting = is_large[:, None] & (values[place] > 0)
            for size in (*_bundles(min(count - 1, MOST_LARGE)), 0):
                if not size:
                    rest = best + np.take_along_axis(of_small, np.maximum(room, 0), axis=1)
                    worths[:, place] = values[place] + np.where(room >= 0, rest, 0.0).max(axis=1)
                before = cells - max(1, size) * taken[:, place, None]
                more = np.take_along_axis(best, np.maximum(before, 0), axis=1) + max(1, size) * values[place]
                best = np.where(fitting & (before >= 0), np.maximum(best, more), best)
        return worths

    def _small_worths(self, rule: FittingRule, values: np.ndarray) -> np.ndarray:
        """[G, CELLS + 1] the most that small sequences are worth in so many cells, begun ones included."""
        is_small = (rule.work_s < SMALL * self.time_s) & (values > 0)
        with np.errstate(divide="ignore"):
            rate = np.where(is_small, values / np.maximum(rule.work_s, 1e-300), -1.0)
        order = np.argsort(-rate, axis=1, kind="stable")
        counts = np.where(is_small, self.counts, 0.0)
        sums = [
            np.cumsum(np.take_along_axis(np.where(is_small, amounts, 0.0) * counts, order, axis=1), axis=1)
            for amounts in (rule.work_s, np.broadcast_to(values, counts.shape))
        ]
        ends_s = np.arange(1, CELLS + 2) * (self.time_s / CELLS)
        return np.stack(
            [np.interp(ends_s, np.append(0.0, works), np.append(0.0, worths)) for works, worths in zip(*sums)]
        )

    def _column(self, group: int, longest: int, rule: FittingRule, values: np.ndarray) -> np.ndarray:
        """[C] sequences of a column that is about as dearest as there are."""
        work_s, left_s, cell_s = rule.work_s[group], max(0.0, rule.beside_s[group, longest]), self.time_s / CELLS
        left = self.counts.copy()
        left[longest] -= 1
        places = [k for k in range(longest + 1) if values[k] > 0 and left[k] > 0 and np.isfinite(work_s[k])]
        large = [(k, int(work_s[k] / cell_s)) for k in places if work_s[k] >= SMALL * self.time_s]
        small = sorted((k for k in places if work_s[k] < SMALL * self.time_s), key=lambda k: -values[k] / work_s[k])
        works = np.append(0.0, np.cumsum([work_s[k] * left[k] for k in small]))
        worths = np.append(0.0, np.cumsum([values[k] * left[k] for k in small]))
        best, steps = np.zeros(CELLS + 1), []
        for k, taken in large:
            for size in _bundles(min(int(left[k]), CELLS // taken)):
                more = np.full(CELLS + 1, -1.0)
                more[size * taken :] = best[: CELLS + 1 - size * taken] + size * values[k]
                steps.append((k, size, taken, more > best))
                best = np.maximum(best, more)
        ends = np.arange(min(int(left_s / cell_s), CELLS) + 1)
        cell = int((best[ends] + np.interp(left_s - ends * cell_s, works, worths)).argmax())
        counts, left_s = np.eye(len(values))[longest], left_s - cell * cell_s
        for k, size, taken, is_better in reversed(steps):
            if is_better[cell]:
                counts[k] += size
                cell -= size * taken
        for k in small:
            part = min(left[k], left_s / work_s[k])
            counts[k] += part
            left_s -= part * work_s[k]
        return counts


def _rules(sequences: StepSequences, time_s: float) -> list[FittingRule]:
    """Under both of which a column has to fit: with shares of overhead, and without."""
    costs, room, devices = sequences.costs, sequences.room, sequences.devices[:, None]
    share = sequences.shares[:, None]
    bare_s, shared_s = costs.bare_device_s / devices, costs.device_s / devices
    busy_s = np.array([room.busy_s(time_s, group) for group in range(len(devices))])[:, None]
    rules = []
    with np.errstate(invalid="ignore", divide="ignore"):
        limits = (
            (shared_s, costs.least_s, costs.drained_s, time_s - costs.bubble_s - shared_s),
            (
                bare_s, costs.bare_least_s, costs.bare_drained_s,
                np.minimum(busy_s - costs.longest_s, room.work_s(time_s, bare_s) - bare_s),
            ),
        )  # fmt: skip
        for work_s, least_s, drained_s, left_s in limits:
            after_s = np.where(share > 0, (time_s - drained_s) / share, np.inf)
            beside_s = np.minimum(left_s, np.minimum(time_s - least_s, after_s))
            fits = np.isfinite(work_s) & (np.maximum(costs.alone_s, drained_s) <= time_s * (1 + ROUNDING))
            beside_s = np.where(fits, beside_s, -np.inf)
            beside_s = np.where((beside_s < 0) & (beside_s >= -ROUNDING * time_s), 0.0, beside_s)
            rules.append(FittingRule(work_s, beside_s))
    shared, (work_s, beside_s) = rules
    return [shared, FittingRule(work_s, np.minimum(beside_s, _beside_idle_s(sequences, time_s, beside_s)))]


def _beside_idle_s(sequences: StepSequences, time_s: float, beside_s: np.ndarray) -> np.ndarray:
    """[G, C] seconds that what idles beside the longest sequence leaves; inf where that is not looked at."""
    room, longest_s = sequences.room, sequences.costs.longest_s
    groups, places = np.nonzero((room.stages[:, None] > 1) & (beside_s > 0) & (longest_s > LONG * time_s))
    left_s = np.full(beside_s.shape, np.inf)
    if len(groups):
        found_s = most_beside_s(
            time_s,
            longest_s[groups, places],
            overhead_s=room.overheads_s[groups],
            slices=room.slices[groups],
            stages=room.stages[groups],
            forwards=(room.least_forwards[groups], room.most_forwards[groups]),
            is_whole=room.is_whole[groups],
        )
        left_s[groups, places] = np.where(found_s >= -ROUNDING * time_s, np.maximum(found_s, 0.0), -np.inf)
    return left_s


def _bundles(count: int) -> list[int]:
    """Sizes that add up to ``count``, some of which add up to each smaller number."""
    sizes = list[int]()
    while count > 0:
        sizes.append(min(count, 1 << len(sizes)))
        count -= sizes[-1]
    return sizes


def _undominated(devices: np.ndarray, fits: np.ndarray, rules: list[FittingRule]) -> np.ndarray:
    """Groups that hold some sequence, and than which no other of as few devices is as good in everything."""
    undominated: list[int] = []
    works = np.concatenate([rule.work_s for rule in rules], axis=1)
    rooms = np.concatenate([rule.beside_s for rule in rules], axis=1)
    able = np.flatnonzero(fits.any(axis=1))
    score = np.where(np.isfinite(rooms), rooms, 0.0).sum(axis=1)
    for group in able[np.lexsort((-score[able], devices[able]))].tolist():
        rivals = [k for k in undominated if devices[k] <= devices[group]]
        if not any((works[k] <= works[group]).all() and (rooms[k] >= rooms[group]).all() for k in rivals):
            undominated.append(group)
    return np.array(undominated, dtype=int)
