"""HotSPa: a homogeneous strategy per length range, switched within the step (Ge et al. 2024).

Each range is a phase over all devices. Its sequences go to the pipeline with the least predicted work, longest first,
and every pipeline packs its own to what memory holds, or finer where stages would idle. Between phases weights and
gradients move, which the plan's time includes; a range without sequences in a step is skipped. Ranges and strategies
are tuned: the best homogeneous strategy competes with the most promising cuts, found by dynamic programming over
estimated times, all compared by planning the samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.makespan import longest_first
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import Pack, batch_floor_s, ranks_of, strategy_bound_s, strategy_floor_s
from lengthwise.plan.uniform.length_ranges import LengthRange, RangeStrategy, propose_ranges
from lengthwise.plan.uniform.tune import fastest, few_recomputes, tiling_candidates, tuning_batches

ROUNDS = (1, 2, 4, 8, 16)
"""Packs of a pipeline of several stages at least, where sequences are short enough."""
CUTS = 8
"""Ways to cut lengths into ranges that are planned in full."""


def prepare(problem: PlanningProblem) -> "HotSpaPolicy":
    """The ranges and strategies that are fastest on the problem's samples.

    Raises:
        InfeasibleError: no homogeneous scheme holds the longest sequence.
    """
    batches = tuning_batches(problem)
    uncut = [
        HotSpaPolicy(problem=problem, ranges=(LengthRange(mode=mode, up_to=problem.max_length),))
        for mode in _modes(tiling_candidates(problem, policy="hotspa"))
    ]
    modes = _modes(few_recomputes(problem.candidates))
    cuts = [ranges for ranges in propose_ranges(problem, modes, batches) if len(ranges) > 1][:CUTS]
    return fastest(
        [fastest(uncut, batches), *(HotSpaPolicy(problem=problem, ranges=ranges) for ranges in cuts)], batches
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class HotSpaPolicy:
    """The policy with given ranges."""

    problem: PlanningProblem
    ranges: tuple[LengthRange, ...]
    """From short to long sequences; what is longer than the last is in it."""

    def __post_init__(self) -> None:
        limits = [length_range.up_to for length_range in self.ranges]
        assert limits and limits == sorted(set(limits)), f"ranges must go from short to long sequences, not {limits}"

    @property
    def candidate(self) -> Candidate:
        """The scheme of the longest sequences."""
        return self.ranges[-1].mode.candidate

    @property
    def name(self) -> str:
        """Count, scheme and longest length of each range, as tables show them."""
        return ", ".join(
            f"{self._count(mode.candidate)} x {mode.candidate.scheme.name} to {up_to:,} tokens"
            for mode, up_to in ((length_range.mode, length_range.up_to) for length_range in self.ranges)
        )

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan; bounded for every way to run the batch on pipelines of these schemes."""
        return DraftPlan(phases=self.phases(priced), lower_bound_s=self.bound_s(priced))

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The draft plan without its bound: a phase for each range that has sequences in this batch."""
        return tuple(
            self._phase(priced, length_range.mode, positions) for length_range, positions in self._split(priced)
        )

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the step takes at least, cheaply: the floors of the phases, and the slowest update."""
        if len(self.ranges) == 1:
            return batch_floor_s(priced, self.candidate) + self.candidate.update_s
        candidates = [(length_range.mode.candidate, positions) for length_range, positions in self._split(priced)]
        floors_s = sum(strategy_floor_s(priced, candidate, positions) for candidate, positions in candidates)
        return floors_s + max(candidate.update_s for candidate, _ in candidates)

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that no plan of these schemes beats, whatever the order and ranges."""
        if len(self.ranges) == 1:
            return strategy_bound_s(priced, self.candidate) + self.candidate.update_s
        return self._pool_bound.step_s(priced)

    @cached_property
    def _pool_bound(self) -> SearchSpaceBound:
        return SearchSpaceBound(
            self.problem, list(dict.fromkeys(length_range.mode.candidate for length_range in self.ranges))
        )

    @cached_property
    def _ranks(self) -> dict[Candidate, list[tuple[int, ...]]]:
        return {
            length_range.mode.candidate: ranks_of(self.problem, length_range.mode.candidate)
            for length_range in self.ranges
        }

    def _count(self, candidate: Candidate) -> int:
        return self.problem.num_devices // candidate.num_devices

    def _split(self, priced: PricedBatch) -> list[tuple[LengthRange, np.ndarray]]:
        """Ranges that have sequences in this batch, with the positions of these."""
        limits = [length_range.up_to for length_range in self.ranges[:-1]]
        numbers = np.searchsorted(limits, priced.lengths)
        split = [(length_range, np.flatnonzero(numbers == number)) for number, length_range in enumerate(self.ranges)]
        return [(length_range, positions) for length_range, positions in split if len(positions)]

    def _phase(self, priced: PricedBatch, mode: RangeStrategy, positions: np.ndarray) -> Phase:
        sequence_ids = positions.tolist()
        times_s = priced.times_s(mode.candidate)[positions].tolist()
        dealt = [[sequence_ids[job] for job in jobs] for jobs in longest_first(times_s, self._count(mode.candidate))]
        return tuple(
            PipelineDraft(candidate=mode.candidate, ranks=ranks, packs=_fill(priced.batch.lengths, jobs, mode))
            for ranks, jobs in zip(self._ranks[mode.candidate], dealt)
        )


def _fill(lengths: Sequence[int], positions: list[int], mode: RangeStrategy) -> tuple[Pack, ...]:
    """Packs of one pipeline: as few as memory allows, but ``rounds`` where sequences are short enough."""
    if not positions:
        return ()
    sizes = [lengths[position] for position in positions]
    share = -(-sum(sizes) // mode.rounds)
    packs = first_fit_decreasing(sizes, max(min(share, mode.candidate.max_tokens), max(sizes)))
    return tuple(tuple(positions[item] for item in pack) for pack in packs)


def _modes(candidates: Sequence[Candidate]) -> list[RangeStrategy]:
    return [
        RangeStrategy(candidate=candidate, rounds=rounds)
        for candidate in candidates
        for rounds in (ROUNDS if candidate.num_stages > 1 else (1,))
    ]
