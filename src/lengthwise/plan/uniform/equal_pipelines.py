"""Policies that run every step as equal pipelines of one scheme; they differ in which packs each pipeline is dealt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.shop import Machines
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft
from lengthwise.plan.space.placement import place
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

ROUNDING = 1e-12
"""Relative, on the side that keeps a bound valid."""

Pack = tuple[int, ...]
"""Positions in the batch of the sequences of one micro-batch."""
Deal = Callable[[PricedBatch, Candidate, int], Sequence[Sequence[Pack]]]
"""From a batch, the candidate and the number of pipelines to the packs of each pipeline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EqualPipelines:
    """One policy with its tuned scheme."""

    problem: PlanningProblem
    candidate: Candidate
    deal: Deal
    is_padded: bool = False
    """Whether each micro-batch is padded to its longest sequence."""
    rows: int = 0
    """Where set, every micro-batch of a step is padded to one shape: this many of the step's longest sequence."""
    setting: str = ""
    """What else was tuned, as tables show it."""

    @cached_property
    def num_pipelines(self) -> int:
        """Pipelines side by side, as many as the cluster has room for."""
        return self.problem.num_devices // self.candidate.num_devices

    @property
    def name(self) -> str:
        """Count and scheme, as tables show them: ``8 x <8,1> ulysses``."""
        return f"{self.num_pipelines} x {self.candidate.scheme.name}" + (f", {self.setting}" if self.setting else "")

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan; bounded for every assignment of the batch to these pipelines."""
        return DraftPlan(phases=self.phases(priced), lower_bound_s=self.bound_s(priced))

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The draft plan without its bound: one phase."""
        dealt = self.deal(priced, self.candidate, self.num_pipelines)
        return (
            tuple(
                PipelineDraft(
                    candidate=self.candidate,
                    ranks=ranks,
                    packs=tuple(packs),
                    padded_to=tuple(self._padded_to(priced, pack) for pack in packs) if self.is_padded else (),
                    rows=self.rows,
                )
                for ranks, packs in zip(self._ranks, dealt)
            ),
        )

    def _padded_to(self, priced: PricedBatch, pack: Pack) -> int:
        return int(priced.lengths.max()) if self.rows else longest(priced, pack)

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the step takes at least; cheap."""
        return batch_floor_s(priced, self.candidate) + self.candidate.update_s

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that no assignment of the batch to these pipelines beats."""
        return strategy_bound_s(priced, self.candidate) + self.candidate.update_s

    @cached_property
    def _ranks(self) -> list[tuple[int, ...]]:
        return ranks_of(self.problem, self.candidate)


def ranks_of(problem: PlanningProblem, candidate: Candidate) -> list[tuple[int, ...]]:
    """Ranks of each of as many equal pipelines of ``candidate`` as the cluster has room for."""
    count = problem.num_devices // candidate.num_devices
    placed = problem.once(
        f"ranks of degree {candidate.scheme.degree} and {candidate.num_stages} stages",
        lambda: place([(candidate, count)], count * candidate.num_devices, problem.devices_per_node),
    )
    return [ranks for _, ranks in placed]


def batch_floor_s(priced: PricedBatch, candidate: Candidate) -> float:
    """What :func:`strategy_floor_s` answers for the whole batch, found once: policies ask for the same candidates."""
    if candidate not in priced.floors_s:
        priced.floors_s[candidate] = strategy_floor_s(priced, candidate, np.arange(len(priced.lengths)))
    return priced.floors_s[candidate]


def strategy_floor_s(priced: PricedBatch, candidate: Candidate, positions: np.ndarray) -> float:
    """A lower bound in seconds for the sequences at ``positions``: every pipeline busy, the longest one alone."""
    times_s, overhead_s = priced.times_s(candidate)[positions], priced.overhead_s(candidate)
    fewest = -(-int(priced.lengths[positions].sum()) // candidate.max_tokens)
    used = priced.problem.num_devices // candidate.num_devices * candidate.num_devices
    even_s = (float(times_s.sum()) + fewest * overhead_s) * candidate.num_devices / used
    return max(even_s, candidate.alone_stages * (float(times_s.max()) + overhead_s))


def strategy_bound_s(priced: PricedBatch, candidate: Candidate) -> float:
    """Seconds that the batch takes at least on equal pipelines of ``candidate``, however it is assigned and packed.

    0 if a sequence fits on none of them: there is no plan to bound.
    """
    problem = priced.problem
    if int(priced.lengths.max()) > candidate.max_tokens:
        return 0.0
    machines = Machines(
        count=problem.num_devices // candidate.num_devices,
        stages=problem.bounding_stages(candidate),
        setup=priced.overhead_s(candidate),
        capacity=candidate.max_tokens,
        min_fill=candidate.cost.util_tokens(candidate.scheme),  # as strategies have it: their certificate is this one
    )
    times_s = priced.times_s(candidate)
    alone_s = candidate.alone_stages * (float(times_s.max()) + priced.overhead_s(candidate))
    return max(priced.certificate(times_s[None, :], [machines]).bound, alone_s * (1 - ROUNDING))


def longest(priced: PricedBatch, pack: Pack) -> int:
    """Tokens of the longest sequence of a pack."""
    return max(priced.batch.lengths[position] for position in pack)


FEW_SEQUENCES = 100_000
"""Sequences of a batch up to which packs are remembered for many capacities, beyond for few."""


def fill(lengths: tuple[int, ...], capacity: int) -> tuple[Pack, ...]:
    """Packs of at most ``capacity`` tokens by first fit decreasing; a longer sequence has a pack of its own.

    Remembered: while schemes are compared, most of them fill the same packs.
    """
    return (_fill_small if len(lengths) <= FEW_SEQUENCES else _fill_large)(lengths, max(capacity, max(lengths)))


def _fill(lengths: tuple[int, ...], capacity: int) -> tuple[Pack, ...]:
    return tuple(tuple(pack) for pack in first_fit_decreasing(lengths, capacity))


_fill_small, _fill_large = lru_cache(maxsize=64)(_fill), lru_cache(maxsize=2)(_fill)


def in_turn(packs: Sequence[Pack], num_pipelines: int) -> list[Sequence[Pack]]:
    """Packs of each pipeline: dealt like cards, so that their numbers differ by one at most."""
    return [packs[number::num_pipelines] for number in range(num_pipelines)]
