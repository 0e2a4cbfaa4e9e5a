"""Pipelines that run each pack as fast as its tokens allow: recompute and methods change from pack to pack."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup, PlacedStrategy
from lengthwise.plan.space.candidate import Candidate, lengths_up_to
from lengthwise.plan.space.parts import FEW_DEVICES
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.space.split_backwards import with_whole_backwards

MOST_COMPARED = 1 << 18
"""Sequences on which the candidates of a family are compared; of more, some at even distances by length."""


@dataclass(frozen=True, kw_only=True)
class CandidateFamily:
    """Candidates that stand in for one another pack by pack; proposals see the fastest that holds each sequence.

    That is a little too fast: as if a pack of short sequences held what the leanest candidate holds. Plans are made
    with :func:`tile_of`, which is exact.
    """

    pivot: Candidate
    """Runs all packs that it holds."""
    leaner: tuple[Candidate, ...] = ()
    """Run longer packs, each more tokens than those before it."""

    @property
    def scheme(self) -> PipelineConfig:
        """The parallel configuration of the pivot."""
        return self.pivot.scheme

    @property
    def cost(self) -> CostModel:
        """The cost model of all candidates."""
        return self.pivot.cost

    @property
    def num_cluster_devices(self) -> int:
        """The devices of the cluster."""
        return self.pivot.num_cluster_devices

    @property
    def num_devices(self) -> int:
        """Devices of one pipeline."""
        return self.pivot.num_devices

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.pivot.num_stages

    @property
    def flow_stages(self) -> float:
        """Stages of a flow shop that takes about as long."""
        return self.pivot.flow_stages

    @property
    def alone_stages(self) -> float:
        """Stages that bound what a micro-batch takes alone."""
        return self.pivot.alone_stages

    @property
    def update_s(self) -> float:
        """Seconds of a step outside its micro-batches, under equal pipelines."""
        return self.pivot.update_s

    @property
    def overhead_s(self) -> float:
        """Seconds per stage that a micro-batch of the pivot costs before its first token."""
        return self.pivot.overhead_s

    @property
    def max_tokens(self) -> int:
        """Most tokens of a micro-batch of the leanest candidate."""
        return (self.pivot, *self.leaner)[-1].max_tokens

    def times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds per stage of each sequence under the fastest candidate that holds it alone."""
        lengths = np.asarray(lengths)
        times_s = self.pivot.times_s(lengths)
        below = self.pivot.max_tokens
        for candidate in self.leaner:
            longer = lengths > below
            if not longer.any():
                break
            times_s = np.where(longer, candidate.times_s(lengths) + candidate.overhead_s - self.overhead_s, times_s)
            below = candidate.max_tokens
        return times_s


ProposedCandidate = Candidate | CandidateFamily
"""What strategies are proposed of."""

StrategyCounts = tuple[tuple[ProposedCandidate, int], ...]
"""How many pipelines of each candidate a strategy has."""


def tile_of(candidate: ProposedCandidate, count: int) -> PipelineGroup:
    """``count`` pipelines of ``candidate`` as the planner sees them."""
    if isinstance(candidate, CandidateFamily):
        return PipelineGroup(candidate=candidate.pivot, count=count, leaner=candidate.leaner)
    return PipelineGroup(candidate=candidate, count=count)


def placed_strategy(problem: PlanningProblem, counts: StrategyCounts) -> PlacedStrategy:
    """The strategy on the ranks of the cluster."""
    return PlacedStrategy(problem, [tile_of(candidate, count) for candidate, count in counts])


def candidate_families(problem: PlanningProblem) -> list[CandidateFamily]:
    """The families of the search space, as :func:`families_of` makes them.

    Of many devices, for which no parts are searched beside it, those with whole backwards: plans that are found are
    split then, and more families would leave fewer of each in the search.
    """
    is_large = problem.num_devices > FEW_DEVICES
    return families_of(problem, with_whole_backwards(problem.candidates) if is_large else problem.candidates)


def families_of(problem: PlanningProblem, candidates: Sequence[Candidate]) -> list[CandidateFamily]:
    """The families of a part of the search space; where there are several stages, the fastest and the leanest alone.

    A family of several methods is there as a whole and with each of its methods alone: which method is faster depends
    on the length, and a ladder of all drops those that are not faster at every length.
    Packs of one pipeline that recompute different shares of their layers have different shares of forward in their
    time. In 1F1B they may then take longer than the flow shop says, so pipelines of several stages keep to one.
    """
    families_by_members: dict[tuple[Candidate, ...], list[CandidateFamily]] = problem.once(
        "families by their members", dict
    )
    chosen = set(candidates)
    families: dict[CandidateFamily, None] = {}
    for everything in problem.families.values():
        members = tuple([candidate for candidate in everything if candidate in chosen])
        by_method: dict[tuple[Method, ...], list[Candidate]] = {}
        for candidate in members:
            by_method.setdefault(candidate.scheme.methods, []).append(candidate)
        for candidates_alike in (members, *map(tuple, by_method.values())) if members else ():
            if candidates_alike not in families_by_members:
                families_by_members[candidates_alike] = _families_of(problem, candidates_alike)
            families |= dict.fromkeys(families_by_members[candidates_alike])
    return list(families)


def _families_of(problem: PlanningProblem, members: Sequence[Candidate]) -> list[CandidateFamily]:
    """The pivot of candidates that stand in for one another, chosen by the samples, and those that are leaner."""
    corpus = problem.once("lengths to compare by", lambda: _ComparedLengths(_compared_lengths(problem)))
    is_mixed = members[0].num_stages == 1
    rungs = fastest_rungs(members) if is_mixed else undominated(members)
    pivot = min(range(len(rungs)), key=lambda level: corpus.time_s(rungs[level:]))
    return [
        CandidateFamily(pivot=run_as[0], leaner=tuple(run_as[1:]))
        for run_as in ([rungs[pivot:]] if is_mixed else [[rungs[pivot]], [rungs[-1]]])
    ]


def families_by_pivot(members: Sequence[Candidate], *, max_pivots: int | None = None) -> list[CandidateFamily]:
    """The families of candidates that stand in for one another by pivots, ``max_pivots`` at even distances, or all.

    A leaner pivot recomputes more and holds larger packs, which pays where an overhead weighs more than recompute.
    Pipelines of several stages run all packs as one candidate.
    """
    is_mixed = members[0].num_stages == 1
    rungs = fastest_rungs(members) if is_mixed else undominated(members)
    num_pivots = max_pivots or len(rungs)
    return [
        CandidateFamily(pivot=rungs[start], leaner=tuple(rungs[start + 1 :]) if is_mixed else ())
        for start in sorted({len(rungs) * number // num_pivots for number in range(num_pivots)})
    ]


def _compared_lengths(problem: PlanningProblem) -> np.ndarray:
    lengths = np.concatenate(problem.samples) if problem.samples else np.array([problem.max_length])
    if len(lengths) > MOST_COMPARED:
        lengths = np.sort(lengths)[:: -len(lengths) // MOST_COMPARED]  # from the longest
    return lengths


def fastest_rungs(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates each of which holds more tokens than those before it, and runs sequences that these do not hold.

    Of all such lists that hold what any candidate holds, the one whose sequences take fewest seconds if those of every
    order of magnitude have as many tokens. No sequence takes less time than a shorter one, which schedules rely on.
    """
    rungs = sorted(candidates, key=lambda candidate: candidate.max_tokens)
    limits = np.array([candidate.max_tokens for candidate in rungs])
    held_s, steps_s = _held_seconds(rungs, limits)
    while True:
        chosen = _fastest_list(held_s, steps_s, ends=limits == limits[-1])
        falling = [
            (less, more)
            for less, more in pairwise(chosen)
            if rungs[more].alone_at_s(int(limits[less])) < rungs[less].alone_at_s(int(limits[less]))
        ]
        if not falling:
            return [rungs[rung] for rung in chosen]
        steps_s[tuple(zip(*falling))] = np.inf


def _held_seconds(rungs: Sequence[Candidate], limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R] seconds of all that each of some candidates holds, and [R, R] of what a later one holds and an earlier not.

    Of sequences that together have as many tokens in every order of magnitude; inf for one that holds no more.
    """
    compared = lengths_up_to(int(limits[-1]))
    lengths = np.union1d(compared, limits)
    logs = np.log([candidate.alone_s(int(limits[-1])) for candidate in rungs])
    times_s = np.exp([np.interp(np.log(lengths), np.log(compared), rung_logs) for rung_logs in logs])
    sums_s = np.cumsum(times_s * np.diff(np.log(lengths), prepend=0.0) / lengths, axis=1)
    ends = np.searchsorted(lengths, limits)
    held_s = sums_s[np.arange(len(rungs)), ends]
    return held_s, np.where(limits > limits[:, None], held_s - sums_s[:, ends].T, np.inf)


def _fastest_list(held_s: np.ndarray, steps_s: np.ndarray, *, ends: np.ndarray) -> list[int]:
    """The numbers of candidates in the fastest list of :func:`fastest_rungs`; ``ends``: which may be its last."""
    to_go_s = np.where(ends, 0.0, np.inf)
    following = np.zeros(len(held_s), dtype=np.int64)
    for rung in np.flatnonzero(~ends)[::-1].tolist():
        totals_s = steps_s[rung] + to_go_s
        following[rung] = totals_s.argmin()
        to_go_s[rung] = totals_s[following[rung]]
    chosen = [int((held_s + to_go_s).argmin())]
    while not ends[chosen[-1]]:
        chosen.append(int(following[chosen[-1]]))
    return chosen


def undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates than which none that holds as many tokens is faster at every length; those that hold most come last.

    They are what a pipeline is worth that runs all its packs as one of them.
    """
    alone = _alone_s(candidates)
    frontier, times_s = list[Candidate](), np.empty((len(candidates), len(next(iter(alone.values())))))
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.max_tokens, alone[candidate].sum())):
        count = len(frontier)
        if not (times_s[:count] <= alone[candidate]).all(axis=1).any():
            times_s[count] = alone[candidate]
            frontier.append(candidate)
    return frontier[::-1]


def _alone_s(candidates: Sequence[Candidate]) -> dict[Candidate, np.ndarray]:
    """Seconds of single sequences of up to the most tokens that any of the candidates holds, under each."""
    longest = max(candidate.max_tokens for candidate in candidates)
    return {candidate: candidate.alone_s(longest) for candidate in candidates}


class _ComparedLengths:
    """Lengths of typical batches, and what they take under one candidate after another, each asked for once."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths, self._longest = lengths, int(lengths.max())
        self._times_s: dict[Candidate, np.ndarray] = {}
        self._longer: dict[int, tuple[np.ndarray, int, int]] = {}
        self._totals_s: dict[tuple[Candidate, ...], float] = {}

    def time_s(self, rungs: Sequence[Candidate]) -> float:
        """Seconds of all sequences with the first rung as pivot; what it cannot hold runs as the leaner ones."""
        last = next((place for place, rung in enumerate(rungs) if rung.max_tokens >= self._longest), len(rungs))
        needed = tuple(rungs[: last + 1])
        if needed not in self._totals_s:
            self._totals_s[needed] = self._total_s(needed)
        return self._totals_s[needed]

    def _total_s(self, rungs: Sequence[Candidate]) -> float:
        pivot, times_s = rungs[0], self._times_of(rungs[0])
        _, packed_tokens, num_longer = self._longer_than(pivot)
        if len(rungs) > 1:
            times_s = times_s.copy()
        for candidate, below in zip(rungs[1:], rungs):
            leaner_s = self._times_of(candidate) + candidate.overhead_s - pivot.overhead_s
            np.copyto(times_s, leaner_s, where=self._longer_than(below)[0])
        shares_s = pivot.overhead_s * packed_tokens / pivot.max_tokens
        return float(times_s.sum()) + shares_s + pivot.overhead_s * num_longer

    def _longer_than(self, candidate: Candidate) -> tuple[np.ndarray, int, int]:
        """Which lengths are more than the candidate holds, the tokens of all others, and how many are longer."""
        if candidate.max_tokens not in self._longer:
            longer = self._lengths > candidate.max_tokens
            self._longer[candidate.max_tokens] = longer, int(self._lengths[~longer].sum()), int(longer.sum())
        return self._longer[candidate.max_tokens]

    def _times_of(self, candidate: Candidate) -> np.ndarray:
        if candidate not in self._times_s:
            self._times_s[candidate] = candidate.times_s(self._lengths)
        return self._times_s[candidate]
