"""Length ranges with a homogeneous strategy each: which ranges and which strategies promise to be fast."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    costs_s = np.mean([estimates_s(priced, modes, edges) for priced in batches], axis=0)
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


def estimates_s(priced: PricedBatch, modes: Sequence[RangeStrategy], edges: np.ndarray) -> np.ndarray:
    """[modes, P, P] seconds of the sequences longer than ``edges[i]`` and not longer than ``edges[j]``, in balance."""
    order = np.argsort(priced.lengths, kind="stable")
    ends = np.searchsorted(priced.lengths[order], edges, side="right")
    tokens = _between(np.concatenate([[0], np.cumsum(priced.lengths[order])])[ends])
    counts = np.maximum(_between(ends), 0)
    last = np.maximum(ends - 1, 0)
    times_s = {
        candidate: priced.times_s(candidate)[order] for candidate in dict.fromkeys(mode.candidate for mode in modes)
    }
    work_s = {
        candidate: _between(np.concatenate([[0.0], np.cumsum(mode_times_s)])[ends])
        for candidate, mode_times_s in times_s.items()
    }

    def column(values: Iterable[float]) -> np.ndarray:
        return np.array(list(values))[:, None, None]

    overhead_s = column(priced.overhead_s(mode.candidate) for mode in modes)
    bubbles = column(mode.candidate.num_stages - 1 for mode in modes)
    num_pipelines = column(priced.problem.num_devices // mode.candidate.num_devices for mode in modes)
    rounds = column(mode.rounds for mode in modes)
    packs = np.maximum(
        -(-tokens // column(mode.candidate.max_tokens for mode in modes)), np.minimum(counts, num_pipelines * rounds)
    )
    packs = np.maximum(packs, 1)
    load_s = np.stack([work_s[mode.candidate] for mode in modes]) + packs * overhead_s
    alone_s = np.stack([times_s[mode.candidate][last] for mode in modes])[:, None, :] + overhead_s
    longest_s = np.maximum(load_s / packs, alone_s)
    if priced.problem.objective is Objective.MAX_TIMES_COUNT:
        total_s = longest_s * (bubbles + np.ceil(packs / num_pipelines))
    else:
        total_s = np.maximum(load_s / num_pipelines, longest_s) + bubbles * longest_s
    return np.where(counts > 0, total_s, 0.0)


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
