"""Packs of several stages that grow where a pipeline begins and shrink where it ends.

Until the last stage has its first input, it waits for S - 1 forwards of the first pack, and in the end the first stage
waits for S - 1 backwards of the last one. So both are small. What comes between can be larger, pack by pack: forwards
of a larger one arrive in time as long as stages behind still have backwards of those before it, which take twice as
long. More packs than equal ones cost more overhead, and short passes at both ends hide less of an update; so what a
pipeline takes is tried for some ramps.

S stages, V packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain
from math import inf

import numpy as np

from lengthwise.core.one_f_one_b import PassTimes, UpdateParts, pipeline_end_s
from lengthwise.core.zero_bubble import filled_end_s
from lengthwise.cost.overlapped import hides_updates
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft, runs_of, strategy_of
from lengthwise.plan.space.draft_times import (
    comm_times_s,
    draft_pipeline_s,
    moved_times_s,
    pack_times_s,
    time_s,
    weight_times_s,
)
from lengthwise.plan.space.problem import PricedBatch

FIRST, LAST, STEEPER = (1.0, 0.5, 0.25, 0.15, 0.1), (1.0, 0.85, 0.7, 0.5), (0.7, 1.0, 1.3, 1.6)
"""Work of the first and of the last pack beside that of the largest, and how steeply packs grow."""
TIMES_AS_MANY = (1.0, 0.8, 0.65, 1.25, 1.6)
"""Packs, beside how many there were."""
USUAL = {"first": 0.25, "last": 0.7, "steeper": 1.3}
"""Where the search for a ramp begins."""
TRIED = 4
"""Ramps that are tried with the sequences themselves."""
USUAL_EXCESS = 0.5
"""The rule for weight passes by which ramps are compared; see ``lengthwise.core.zero_bubble``."""
PASS_S, SPLIT_PASS_S = 5e-5, 5e-4
"""About the seconds of trying ramps for each stage and pack, with whole and with split backwards."""
BISECTIONS = 30


@dataclass(frozen=True)
class Ramp:
    """How large the packs of a pipeline are beside one another."""

    num_packs: int
    first: float = 1.0
    last: float = 1.0
    steeper: float = 1.0
    """The power of ``steepest_growth`` by which packs grow."""

    def shares(self, num_stages: int) -> np.ndarray:
        """[V] of the work of all packs."""
        growth, number = steepest_growth(num_stages) ** self.steeper, np.arange(self.num_packs)
        sizes = np.minimum(self.first * growth**number, self.last * growth ** number[::-1])
        sizes = np.minimum(1.0, sizes)
        shares: np.ndarray = sizes / sizes.sum()
        return shares


@lru_cache
def steepest_growth(num_stages: int) -> float:
    """How many times as large as the one before it each pack may be whose forwards are to arrive in time.

    They take S - 1 forwards down the stages, and the last stage meanwhile has backwards of the S - 1 packs before it,
    of two forwards each: S - 1 = 2 (1 / g + ... + 1 / g^(S - 1)).
    """
    low, high = 1.0, 3.0
    for _ in range(BISECTIONS):
        growth = (low + high) / 2
        is_covered = 2 * sum(growth**-k for k in range(1, num_stages)) >= num_stages - 1
        low, high = (growth, high) if is_covered else (low, growth)
    return low


def deal(positions: Sequence[int], times_s: np.ndarray, sizes_s: Sequence[float]) -> list[list[int]]:
    """Deal sequences, the longest first, to packs: each to the one that lacks most of its size."""
    left = [(-size_s, number) for number, size_s in enumerate(sizes_s)]
    heapify(left)
    packs: list[list[int]] = [[] for _ in left]
    for position in positions:
        lacking_s, number = left[0]
        packs[number].append(position)
        heapreplace(left, (lacking_s + float(times_s[position]), number))
    return packs


def can_ramp(pipeline: PipelineDraft) -> bool:
    """Whether a pipeline waits for whole packs of one candidate, which may have any size."""
    candidate, is_alike = pipeline.candidate, len(set(runs_of(pipeline))) == 1
    is_plain = not (pipeline.padded_to or candidate.longest_local or candidate.reduction is not None)
    return candidate.num_stages > 1 and candidate.scheme.slices == 1 and is_alike and is_plain


def ramped(priced: PricedBatch, draft: DraftPlan) -> tuple[DraftPlan, float]:
    """The draft plan with every pipeline in the ramp that is fastest for it, and its seconds."""
    cost, last = priced.problem.cost, len(draft.phases) - 1
    strategies = [strategy_of(phase, priced.problem.num_devices) for phase in draft.phases]
    parts = cost.update_parts(strategies) if hides_updates(cost) else None
    phases = tuple(
        tuple(
            _Ramps(priced, pipeline, parts, is_first=number == 0, is_last=number == last).fastest()
            if can_ramp(pipeline)
            else pipeline
            for pipeline in phase
        )
        for number, phase in enumerate(draft.phases)
    )
    option = replace(draft, phases=phases)
    return option, time_s(priced, option)


def may_ramp(priced: PricedBatch, draft: DraftPlan, *, most_s: float = inf) -> bool:
    """Whether any pipeline of a draft plan can have ramps, and to try them takes about ``most_s`` seconds at most."""
    problem = priced.problem
    if problem.objective is not Objective.FLOW_SHOP or problem.lattice is not None:
        return False
    able = [pipeline for pipeline in chain.from_iterable(draft.phases) if can_ramp(pipeline)]
    return bool(able) and sum(map(_search_s, able)) <= most_s


def _search_s(pipeline: PipelineDraft) -> float:
    scheme = pipeline.candidate.scheme
    return (SPLIT_PASS_S if scheme.zero_bubble else PASS_S) * scheme.num_stages * len(pipeline.packs)


class _Ramps:
    """The ramps of one pipeline, as if its work could be cut anywhere, and with its sequences."""

    def __init__(self, priced: PricedBatch, pipeline: PipelineDraft, parts: UpdateParts | None, **ends: bool) -> None:
        """``parts``: of the update that passes hide; ``ends``: whether they are of the first phase and of the last."""
        self._priced, self._pipeline, self._parts, self._ends = priced, pipeline, parts, ends
        self._candidate = runs_of(pipeline)[0]
        self._overhead_s = priced.overhead_s(self._candidate)
        lengths = priced.batch.lengths
        self._positions = sorted(chain.from_iterable(pipeline.packs), key=lambda k: (-lengths[k], priced.batch.ids[k]))
        times_s = pack_times_s(priced, pipeline)
        self._work_s = sum(times_s) - self._overhead_s * len(times_s)
        self._weights = sum(weight_times_s(priced, pipeline, times_s)) / self._work_s
        comm_s = comm_times_s([self._candidate], [[lengths[k] for k in self._positions]])
        self._computed = max(0.0, 1 - sum(comm_s) / self._work_s)
        self._most_filled = sum(lengths[k] for k in self._positions) / self._candidate.max_tokens
        """Packs of as many tokens as fit that all sequences would fill."""

    def fastest(self) -> PipelineDraft:
        """The pipeline, or the same sequences in the fastest ramp."""
        best, best_s = self._pipeline, self._end_s(self._pipeline)
        for ramp in self._that_seem_fastest():
            option = self._packed(ramp)
            if option is not None and (option_s := self._end_s(option)) < best_s:
                best, best_s = option, option_s
        return best

    def _that_seem_fastest(self) -> list[Ramp]:
        """A few ramps, the fastest first: each of its figures is tried, the others as they were best, twice."""
        num_packs = [max(1, round(len(self._pipeline.packs) * times)) for times in TIMES_AS_MANY]
        best, seconds = Ramp(num_packs[0], **USUAL), dict[Ramp, float]()
        values = {"num_packs": num_packs, "first": FIRST, "last": LAST, "steeper": STEEPER}
        for name in (*values, *values):
            options = [replace(best, **{name: value}) for value in values[name]]  # type: ignore[arg-type]
            seconds |= {ramp: self._ideal_s(ramp) for ramp in options if ramp not in seconds}
            best = min(options, key=lambda ramp: seconds[ramp])
        return sorted((ramp for ramp in seconds if seconds[ramp] < inf), key=lambda ramp: seconds[ramp])[:TRIED]

    def _ideal_s(self, ramp: Ramp) -> float:
        """Seconds of the pipeline if its work could be cut anywhere, and beyond them of what no pass hides; inf where a
        pack would be too long.
        """
        scheme, forwards = self._candidate.scheme, self._candidate.forwards
        shares = ramp.shares(scheme.num_stages)
        if shares.max() * self._most_filled > 1:
            return inf
        works_s = shares * self._work_s
        forwards_s = ((works_s + self._overhead_s) / forwards).tolist()
        backwards_s = ((works_s + self._overhead_s) * (1 - 1 / forwards)).tolist()
        if scheme.zero_bubble:
            passes = PassTimes(forwards_s, backwards_s, (works_s * self._weights).tolist())
            end_s = filled_end_s(passes, scheme.num_stages, excesses=(USUAL_EXCESS,))
        else:
            times_s = (works_s + self._overhead_s).tolist()
            end_s = pipeline_end_s(times_s, [forwards] * len(times_s), scheme.num_stages)
        if self._parts is None:
            return end_s
        first_s, last_s = (works_s[[0, -1]] * self._computed).tolist()
        if self._ends["is_first"]:
            end_s += self._parts.exposed_pull_s(first_s / forwards)
        if self._ends["is_last"]:
            end_s += self._parts.exposed_push_s(last_s * (1 - 1 / forwards))
        return end_s

    def _packed(self, ramp: Ramp) -> PipelineDraft | None:
        """The sequences, the longest first, each in the pack that lacks most work; None where some pack is too long."""
        times_s, lengths = self._priced.times_s(self._candidate), self._priced.batch.lengths
        works_s = ramp.shares(self._candidate.num_stages) * self._work_s
        packs = deal(self._positions, times_s, works_s.tolist())
        if any(sum(lengths[k] for k in pack) > self._candidate.max_tokens for pack in packs):
            return None
        return PipelineDraft(
            candidate=self._candidate,
            ranks=self._pipeline.ranks,
            packs=tuple(tuple(pack) for pack in packs if pack),
            is_in_order=True,
        )

    def _end_s(self, pipeline: PipelineDraft) -> float:
        """Seconds of the pipeline, and beyond them of what its first and last pass do not hide of the update."""
        times_s = pack_times_s(self._priced, pipeline)
        moved_s = [0.0]
        if self._parts is not None:
            moved_s = moved_times_s(self._priced, (pipeline,), [times_s], self._parts, **self._ends)
        return draft_pipeline_s(self._priced, pipeline, times_s)[0] + moved_s[0]
