"""Length ranges with a homogeneous strategy each: which ranges and which strategies promise to be fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lengthwise.core.pipeline_config import homogeneous
from lengthwise.plan.solve.segments import best_segmentations
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

MAX_RANGES = 4
"""Strategies within one step that HotSPa sets (Hydraulis, section 8.1)."""
MAX_MODES = 12
"""Modes among which ranges choose: those that are best for the most ranges."""
EDGE_RATIO = 2**0.25
"""Least ratio of neighbouring edges: a narrower range would follow the samples, not the corpus."""


@dataclass(frozen=True, kw_only=True)
class RangeStrategy:
    """A homogeneous strategy, and how finely its pipelines pack."""

    candidate: Candidate
    rounds: int = 1
    """Packs of a pipeline at least, where sequences are short enough."""


@dataclass(frozen=True, kw_only=True)
class LengthRange:
    """Sequences longer than those of the range before, and how they are computed."""

    mode: RangeStrategy
    up_to: int
    """Longest length, in tokens."""


def propose_ranges(
    problem: PlanningProblem, modes: Sequence[RangeStrategy], batches: Sequence[PricedBatch]
) -> list[tuple[LengthRange, ...]]:
    """Promising ways to cut lengths into ranges, the one with the least estimated time first."""
    edges = _edges(problem, modes, shortest=min(int(priced.lengths.min()) for priced in batches))
    costs_s = estimates_s(problem, modes, edges, batches)
    limits = np.array([mode.candidate.max_tokens for mode in modes])
    present = np.mean([_counts(priced, edges) > 0 for priced in batches], axis=0)
    allowed = (edges <= limits[:, None, None]) & (present > 0)
    costs_s = np.where(allowed, costs_s, np.inf)
    best_modes = _best_somewhere(costs_s)
    segmentations = best_segmentations(
        costs_s[best_modes],
        _switches_s(problem, [modes[index].candidate for index in best_modes]),
        present,
        max_segments=MAX_RANGES,
    )
    return [
        tuple(LengthRange(mode=modes[best_modes[index]], up_to=int(edges[end])) for index, _, end in segments)
        for _, segments in segmentations
    ]


class _Modes:
    """What estimates need of modes: columns [modes, 1]."""

    def __init__(self, problem: PlanningProblem, modes: Sequence[RangeStrategy]) -> None:
        self.candidates = list(dict.fromkeys(mode.candidate for mode in modes))
        places = {candidate: place for place, candidate in enumerate(self.candidates)}
        self.places = np.array([places[mode.candidate] for mode in modes])
        """[modes] of the candidate of each."""
        per_sequence = problem.overhead_per_sequence
        self.overhead_s = self._column([0.0 if per_sequence else k.overhead_s for k in self.candidates])
        self.bubbles = self._column([k.num_stages - 1 for k in self.candidates])
        self.num_pipelines = self._column([problem.num_devices // k.num_devices for k in self.candidates])
        self.max_tokens = self._column([k.max_tokens for k in self.candidates])
        self.rounds = np.array([mode.rounds for mode in modes])[:, None]

    def _column(self, values: Sequence[float]) -> np.ndarray:
        return np.array(values)[self.places, None]


def estimates_s(
    problem: PlanningProblem, modes: Sequence[RangeStrategy], edges: np.ndarray, batches: Sequence[PricedBatch]
) -> np.ndarray:
    """[modes, P, P] seconds of the sequences longer than ``edges[i]`` and not longer than ``edges[j]``, in balance: of
    the average batch.
    """
    of_modes = _Modes(problem, modes)
    total_s = np.zeros((len(modes), len(edges), len(edges)))
    for priced in batches:
        order = np.argsort(priced.lengths, kind="stable")
        ends = np.searchsorted(priced.lengths[order], edges, side="right")
        first, last = np.nonzero(_between(ends) > 0)  # other ranges have no sequences, and take no time
        tokens = np.concatenate([[0], np.cumsum(priced.lengths[order])])[ends]
        times_s = np.stack([priced.times_s(candidate)[order] for candidate in of_modes.candidates])
        done_s = np.concatenate([np.zeros((len(times_s), 1)), np.cumsum(times_s, axis=1)], axis=1)[:, ends]
        of_ranges = _Ranges(
            counts=(ends[last] - ends[first])[None, :],
            tokens=(tokens[last] - tokens[first])[None, :],
            work_s=done_s[:, last] - done_s[:, first],
            longest_s=times_s[:, np.maximum(ends - 1, 0)[last]],
        )
        total_s[:, first, last] += _balanced_s(of_modes, of_ranges, problem.objective)
    return total_s / len(batches)


class _Ranges(NamedTuple):
    """Sequences of R ranges of lengths under C candidates."""

    counts: np.ndarray
    """[1, R]"""
    tokens: np.ndarray
    """[1, R]"""
    work_s: np.ndarray
    """[C, R] seconds of all of them."""
    longest_s: np.ndarray
    """[C, R] seconds of the longest."""


def _balanced_s(modes: _Modes, ranges: _Ranges, objective: Objective) -> np.ndarray:
    """[modes, R] seconds of each range in balance."""
    num_pipelines = modes.num_pipelines
    packs = np.maximum(-(-ranges.tokens // modes.max_tokens), np.minimum(ranges.counts, num_pipelines * modes.rounds))
    packs = np.maximum(packs, 1)
    load_s = ranges.work_s[modes.places] + packs * modes.overhead_s
    longest_s = np.maximum(load_s / packs, ranges.longest_s[modes.places] + modes.overhead_s)
    if objective is Objective.MAX_TIMES_COUNT:
        return longest_s * (modes.bubbles + np.ceil(packs / num_pipelines))
    return np.maximum(load_s / num_pipelines, longest_s) + modes.bubbles * longest_s


def _between(cumulated: np.ndarray) -> np.ndarray:
    return cumulated[None, :] - cumulated[:, None]


def _counts(priced: PricedBatch, edges: np.ndarray) -> np.ndarray:
    return _between(np.searchsorted(np.sort(priced.lengths), edges, side="right"))


def _edges(problem: PlanningProblem, modes: Sequence[RangeStrategy], *, shortest: int) -> np.ndarray:
    """0, halves of the longest length down to the shortest, and what each mode holds; none too near to another."""
    longest = problem.max_length
    halves = {longest >> power for power in range(1, longest.bit_length())}
    edges = [0]
    for edge in sorted(halves | {mode.candidate.max_tokens for mode in modes}):
        if shortest <= edge <= longest / EDGE_RATIO and edge >= edges[-1] * EDGE_RATIO:
            edges.append(edge)
    return np.array([*edges, longest])


def _best_somewhere(costs_s: np.ndarray) -> list[int]:
    """The modes that are the cheapest for some range, those that are for the most ranges; always for the whole."""
    votes = np.bincount(costs_s.argmin(axis=0)[np.isfinite(costs_s).any(axis=0)], minlength=len(costs_s))
    votes[costs_s[:, 0, -1].argmin()] = costs_s[0].size + 1
    ranked = np.argsort(-votes, kind="stable")[:MAX_MODES]
    return sorted(ranked[votes[ranked] > 0].tolist())


def _switches_s(problem: PlanningProblem, candidates: Sequence[Candidate]) -> np.ndarray:
    """[modes, modes] seconds between phases; inf between equal ones, which would be one phase."""
    devices = problem.num_devices
    strategies = [homogeneous(k.scheme, devices, num_idle=devices % k.num_devices) for k in candidates]
    cost = problem.candidates[0].cost
    return np.array(
        [[np.inf if before == after else cost.switch_s(before, after) for after in strategies] for before in strategies]
    )
