"""The candidates that are worth a place in a strategy."""

from collections.abc import Sequence

import numpy as np

from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate
from lengthwise.plan.heterogeneous.propose.planned import pack_tokens_of
from lengthwise.plan.space.problem import PlanningProblem

MOST = 20
"""Kinds that are kept."""
GRID = 24
"""Lengths at which candidates are compared: quantiles by tokens."""
EQUAL_CANDIDATES, EQUAL_STEPS = 4, 8
"""Kinds that may be the best to use alone, and samples that they are compared on."""
URGENT = 2
"""The longest of these lengths, for which it also counts how long a sequence takes alone."""
TIGHTNESS = (0.0, 0.25, 0.6, 1.0)
"""How much of the bubble and the overhead of a micro-batch of its own a sequence is charged."""


def reduce_candidates(
    candidates: Sequence[ProposedCandidate],
    lengths: np.ndarray,
    *,
    max_candidates: int = MOST,
    keep: Sequence[ProposedCandidate] = (),
) -> list[ProposedCandidate]:
    """Keep at most ``max_candidates`` candidates, in their order, without those that another is at least as good as.

    A candidate is dominated by one of the same number of devices that holds as long sequences and packs, has no more
    stages or overhead and is never slower; of equals the first is kept. Of the others, those are kept that come closest
    to the fewest device-seconds at some length, if need be within some time, or on the whole corpus if equal pipelines
    of them tile the cluster; and the one that computes the longest sequences in the least time, and those of ``keep``
    that are not dominated.
    """
    candidates = list(dict.fromkeys(candidates))
    grid = _grid(lengths)
    times_s = np.stack([np.asarray(candidate.times_s(grid), dtype=np.float64) for candidate in candidates])
    limits = np.array([candidate.max_tokens for candidate in candidates])
    times_s[grid > limits[:, None]] = np.inf
    left = np.flatnonzero(~_dominated(candidates, times_s))
    candidates, times_s, limits = [candidates[index] for index in left], times_s[left], limits[left]
    if len(candidates) <= max_candidates:
        return candidates
    order = np.argsort(_regrets(candidates, times_s, grid), kind="stable").tolist()
    holding = np.flatnonzero(limits >= min(grid[-1], limits.max())).tolist()
    fastest = min(
        holding, key=lambda index: candidates[index].alone_stages * float(candidates[index].times_s(grid[-1:])[0])
    )
    wanted = [fastest, *(index for index, candidate in enumerate(candidates) if candidate in keep), *order]
    return [candidates[index] for index in sorted(list(dict.fromkeys(wanted))[:max_candidates])]


class EqualPipelineEstimates:
    """What steps take on equal pipelines of one candidate after another, as if work could be balanced: each of d
    pipelines computes a d-th of it and one of the d longest sequences, for which all its other stages wait.
    """

    def __init__(self, problem: PlanningProblem, samples: Sequence[np.ndarray]) -> None:
        self._problem = problem
        self._steps = [np.unique(sample, return_counts=True) for sample in samples[:: -(-len(samples) // EQUAL_STEPS)]]
        self._ends = np.cumsum([len(lengths) for lengths, _ in self._steps])[:-1]
        self._lengths = np.concatenate([lengths for lengths, _ in self._steps])
        self._sums_s: dict[ProposedCandidate, float] = {}

    def likely(self, candidates: Sequence[ProposedCandidate], *, holding: int) -> list[ProposedCandidate]:
        """The few candidates holding ``holding`` tokens whose equal pipelines are probably fastest on the samples."""
        tiling = [
            candidate
            for candidate in candidates
            if self._problem.num_devices % candidate.num_devices == 0 and candidate.max_tokens >= holding
        ]
        order = np.argsort([self._sum_s(candidate) for candidate in tiling], kind="stable")
        return [tiling[index] for index in order[:EQUAL_CANDIDATES]]

    def _sum_s(self, candidate: ProposedCandidate) -> float:
        if candidate not in self._sums_s:
            of_steps = np.split(candidate.times_s(self._lengths), self._ends)
            self._sums_s[candidate] = sum(
                _equal_s(self._problem, candidate, times_s, *step) for times_s, step in zip(of_steps, self._steps)
            )
        return self._sums_s[candidate]


def _equal_s(
    problem: PlanningProblem,
    candidate: ProposedCandidate,
    times_s: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
) -> float:
    """Seconds of ``counts`` sequences of each length, the shortest first, on equal pipelines of ``candidate``."""
    count, overhead_s = problem.num_devices // candidate.num_devices, candidate.overhead_s
    times_s = times_s + overhead_s * problem.overhead_per_sequence
    tokens = int(lengths @ counts)
    packs_s = (
        0.0 if problem.overhead_per_sequence else overhead_s * max(1.0, tokens / pack_tokens_of(candidate) / count)
    )
    enough = np.minimum(counts[::-1], count)[:count]
    longest_s = np.repeat(times_s[::-1][:count], enough)[:count]
    waiting_s = (candidate.flow_stages - 1) * float(longest_s.mean() + overhead_s)
    alone_s = candidate.alone_stages * float(longest_s[0] + overhead_s)
    return max(float(times_s @ counts) / count + packs_s + waiting_s, alone_s)


def _grid(lengths: np.ndarray) -> np.ndarray:
    ordered = np.sort(lengths)
    tokens = np.cumsum(ordered)
    places = np.searchsorted(tokens, np.linspace(0, 1, GRID) * tokens[-1])
    return np.unique(ordered[np.minimum(places, len(ordered) - 1)])


def _dominated(candidates: list[ProposedCandidate], times_s: np.ndarray) -> np.ndarray:
    """[K] whether some other candidate is at least as good in every respect."""
    merits = [
        (-candidate.max_tokens, -pack_tokens_of(candidate), candidate.flow_stages, candidate.overhead_s, *row)
        for candidate, row in zip(candidates, times_s.tolist())
    ]
    values = np.array(merits)
    devices = np.array([candidate.num_devices for candidate in candidates])
    dominated = np.zeros(len(candidates), dtype=bool)
    for index in range(len(candidates)):
        no_worse = (values <= values[index]).all(axis=1) & (devices == devices[index])
        equal = no_worse & (values == values[index]).all(axis=1)
        dominated[index] = (no_worse & ~equal).any() or bool(equal[:index].any())
    return dominated


def _regrets(candidates: list[ProposedCandidate], times_s: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """[K] device-seconds over the fewest of any candidate, where a candidate comes closest to them.

    Lengths are compared one by one, and all together for candidates that tile the cluster. The longest sequences may
    not wait: for them, only candidates that take no longer are compared with.
    """
    devices = np.array([[candidate.num_devices] for candidate in candidates])
    stages = np.array([[candidate.flow_stages] for candidate in candidates])
    overheads_s = np.array([[candidate.overhead_s] for candidate in candidates])
    packs = np.maximum(np.array([[pack_tokens_of(candidate)] for candidate in candidates]), grid)
    fits = np.isfinite(times_s)
    work_s = np.where(fits, times_s, 0.0)
    spread_s = work_s + overheads_s * grid / packs
    bubble_s = (stages - 1) * (work_s + overheads_s) + overheads_s
    costs_s = np.stack([np.where(fits, devices * (spread_s + tight * bubble_s), np.inf) for tight in TIGHTNESS])
    tiling = np.array([candidate.num_cluster_devices % candidate.num_devices == 0 for candidate in candidates])
    sums_s = np.where(tiling, costs_s.sum(axis=2), np.inf)
    alone_s = np.where(fits, stages * (work_s + overheads_s), np.inf)[:, -URGENT:]
    in_time = alone_s[None] <= alone_s[:, None]
    urgent_s = costs_s[0, :, -URGENT:]
    rivals_s = np.where(in_time, urgent_s[None], np.inf).min(axis=1)
    return np.concatenate(
        [
            _over(costs_s, costs_s.min(axis=1, keepdims=True)).min(axis=(0, 2))[None],
            _over(sums_s, sums_s.min(axis=1, keepdims=True)).min(axis=0)[None],
            _over(urgent_s, rivals_s).min(axis=1)[None],
        ]
    ).min(axis=0)


def _over(values: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Ratio of what may be infinite, then infinite."""
    return np.divide(values, least, out=np.full(values.shape, np.inf), where=np.isfinite(values))
