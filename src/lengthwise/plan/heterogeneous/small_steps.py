"""Steps of few sequences, searched one by one beside what a policy has prepared for its corpus.

Strategies proposed for a corpus, and buckets by length, say little of a step of a handful of sequences. For such a step
a policy also plans strategies of its own candidates: all that tile the devices where those are few, else those that are
proposed for this step alone, and two phases of them where the policy may switch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Protocol

import numpy as np

from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.dcp import dcp
from lengthwise.plan.heterogeneous import hydraulis
from lengthwise.plan.heterogeneous.adaptive_pipelines import (
    CandidateFamily,
    ProposedCandidate,
    StrategyCounts,
    candidate_families,
    families_by_pivot,
    families_of,
    placed_strategy,
    tile_of,
)
from lengthwise.plan.heterogeneous.fastest_runs import FastestRuns
from lengthwise.plan.heterogeneous.propose import propose
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates
from lengthwise.plan.heterogeneous.two_phase_split import SplitSearch, front_strategies
from lengthwise.plan.heterogeneous.two_stage_assignment import PlacedStrategy
from lengthwise.plan.policies import Policy
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.parts import holding, parts_of
from lengthwise.plan.space.placement import placeable
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

FEW_SEQUENCES = 16
"""Most sequences of a step that is searched."""
ENOUGH = 0.01
"""Gap to the bound at which it is not."""
MOST_PLANNED = 24
"""Strategies of a step that `auto` plans for each part of the search space, those of the least floors."""
HARDLY = 1.02
"""Running packs as other candidates hardly makes a plan faster than the floor of its strategy by this factor."""
FEW_STRATEGIES = 96
"""If no more strategies than this tile the devices, all are looked at,"""
MOST_RUNGS = 5
"""Members of a family that are tried as pivots."""
PROPOSED_STRATEGIES, EFFORT = 8, 2
"""else so many that this many local searches find."""


class SpacePolicy(Policy, Protocol):
    """A policy that says which candidates it plans with."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """What its plans may be made of."""
        ...

    @property
    def bound(self) -> SearchSpaceBound:
        """The lower bound of all plans of these candidates."""
        ...


def prepare_hydraulis(problem: PlanningProblem) -> "SmallStepPolicy":
    """Hydraulis, which also searches steps of few sequences in its published space."""
    return SmallStepPolicy(problem, hydraulis.prepare(problem), switches=False)


def prepare_dcp_inter(problem: PlanningProblem) -> "SmallStepPolicy":
    """DCP-inter, which also searches steps of few sequences among its candidates."""
    return SmallStepPolicy(problem, dcp.prepare_inter(problem), switches=True)


def prepare_dcp_intra(problem: PlanningProblem) -> "SmallStepPolicy":
    """DCP-intra, which also searches steps of few sequences among its candidates."""
    return SmallStepPolicy(problem, dcp.prepare_intra(problem), switches=True)


class SmallStepPolicy:
    """A policy and a search of the steps that are too small for what it has prepared."""

    def __init__(self, problem: PlanningProblem, policy: SpacePolicy, *, switches: bool) -> None:
        """``switches``: whether a step of the policy may have two phases."""
        self.problem, self.policy, self.switches = problem, policy, switches
        self._runs = FastestRuns(policy.candidates)

    @property
    def name(self) -> str:
        """What the policy has chosen for the problem, as tables show it."""
        return self.policy.name

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan, bounded for all plans of the policy's candidates."""
        return DraftPlan(phases=self.phases(priced), lower_bound_s=self.policy.bound.step_s(priced))

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The faster of the policy's draft plan and what is found for the step alone."""
        phases = self.policy.phases(priced)
        if len(priced.lengths) > FEW_SEQUENCES:
            return phases
        best_s = time_s(priced, DraftPlan(phases=phases))
        if best_s <= self.policy.bound.step_s(priced) * (1 + ENOUGH):
            return phases
        for searched in self._drafts(priced, best_s):
            draft = self._runs.of(priced, searched)
            if (draft_s := time_s(priced, draft)) < best_s:
                phases, best_s = draft.phases, draft_s
        return phases

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the policy's step takes at least; cheap."""
        return self.policy.floor_s(priced)

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that the policy's step takes at least."""
        if len(priced.lengths) > FEW_SEQUENCES:
            return self.policy.bound_s(priced)
        return self.policy.bound.step_s(priced)

    def _drafts(self, priced: PricedBatch, best_s: float) -> Iterator[DraftPlan]:
        """The fastest plans of one phase, and of two, of strategies for this step alone."""
        step = replace(
            self.problem,
            candidates=tuple(self.policy.candidates),
            samples=(priced.lengths,),
            max_length=int(priced.lengths.max()),
        )
        families = candidate_families(step)
        strategies = StrategyCandidates(
            [placed_strategy(self.problem, counts) for counts in strategies_of_step(step, families)]
        )
        planned = strategies.best(priced, strategies.bounds_s(priced))
        if planned is not None:
            yield DraftPlan(phases=(planned.phase,))
        if self.switches:
            splits = SplitSearch(front_strategies(step, [families]), strategies, self.policy.bound)
            split, _ = splits.best(priced, best_s)
            if split is not None:
                yield split


def drafts_of_step(
    priced: PricedBatch, candidates: Sequence[Candidate], runs: FastestRuns, *, limit_s: float
) -> list[tuple[DraftPlan, float]]:
    """Draft plans of one phase for a step of few sequences alone, and their seconds; none where strategies are many.

    Args:
        priced: the step.
        candidates: what its plan may be made of.
        runs: chooses among them, pack by pack.
        limit_s: seconds of the fastest plan so far.
    """
    step = replace(priced.problem, samples=(priced.lengths,), max_length=int(priced.lengths.max()))
    strategies: dict[StrategyCounts, PlacedStrategy] = {}
    promising: dict[PlacedStrategy, float] = {}
    parts = holding(parts_of(candidates), step.max_length)
    families = [families_of(step, part) for part in parts]
    counts_by_part = [equal_pipelines(step, rungs(families[0], parts[0], max_pivots=None))]
    counts_by_part += [
        [*few_strategies(step, rungs(of_part, part)), *few_strategies(step, of_part, least_used=1)]
        for of_part, part in zip(families, parts)
    ]
    for counts in counts_by_part:
        for of in counts:
            if of not in strategies:
                strategies[of] = placed_strategy(priced.problem, of)
        of_part = [strategies[of] for of in dict.fromkeys(counts)]
        floors_s = [strategy.floor_s(priced) + strategy.update_s for strategy in of_part]
        fewest = np.argsort(floors_s, kind="stable").tolist()[:MOST_PLANNED]
        promising |= {of_part[number]: floors_s[number] for number in fewest}
    drafts = []
    for strategy in sorted(promising, key=lambda strategy: promising[strategy]):
        if promising[strategy] >= limit_s * HARDLY:
            break
        phase = strategy.planned(priced)[0]
        phases = [phase] if all(pipeline.candidate.num_stages == 1 for pipeline in phase) else [phase, _alone(phase)]
        for option in phases:
            draft = runs.of(priced, DraftPlan(phases=(option,)))
            drafts.append((draft, time_s(priced, draft)))
            limit_s = min(limit_s, drafts[-1][1])
    return drafts


def _alone(phase: Phase) -> Phase:
    """Give every sequence a pack of its own: many short passes leave stages less idle."""
    return tuple(
        replace(pipeline, packs=tuple([(position,) for pack in pipeline.packs for position in pack]), runs=())
        for pipeline in phase
    )


def rungs(
    families: Sequence[CandidateFamily], candidates: Sequence[Candidate], *, max_pivots: int | None = MOST_RUNGS
) -> list[CandidateFamily]:
    """These families, and those of all candidates with other members as pivots, ``max_pivots`` of each or all."""
    by_family: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        by_family.setdefault(candidate.family, []).append(candidate)
    pivoted = (family for members in by_family.values() for family in families_by_pivot(members, max_pivots=max_pivots))
    return list({(family.pivot, *family.leaner): family for family in (*pivoted, *families)}.values())


def equal_pipelines(problem: PlanningProblem, families: Sequence[CandidateFamily]) -> list[StrategyCounts]:
    """The strategies of one family alone that occupy all devices."""
    shares = ((family, problem.num_devices // family.num_devices) for family in families)
    return [((family, count),) for family, count in shares if count * family.num_devices == problem.num_devices]


def strategies_of_step(problem: PlanningProblem, candidates: Sequence[ProposedCandidate]) -> list[StrategyCounts]:
    """Strategies worth planning for the one step that ``problem`` samples: all where those are few."""
    if strategies := few_strategies(problem, candidates):
        return strategies
    proposed = propose(problem, candidates, max_strategies=PROPOSED_STRATEGIES, effort=EFFORT)
    return [proposal.counts for proposal in proposed]


def few_strategies(
    problem: PlanningProblem, candidates: Sequence[ProposedCandidate], *, least_used: int = 0
) -> list[StrategyCounts]:
    """All strategies of these candidates that tile the devices, or none if they are more than ``FEW_STRATEGIES``.

    Those too that use but ``least_used`` devices, if that is not 0.
    """
    used = range(problem.num_devices, (least_used or problem.num_devices) - 1, -1)
    tilings = list(islice(chain.from_iterable(_tilings(candidates, count) for count in used), FEW_STRATEGIES + 1))
    return [counts for counts in tilings if _is_placeable(problem, counts)] if len(tilings) <= FEW_STRATEGIES else []


def _is_placeable(problem: PlanningProblem, counts: StrategyCounts) -> bool:
    pipelines = [(tile_of(candidate, count).candidate, count) for candidate, count in counts]
    used = sum(candidate.num_devices * count for candidate, count in pipelines)
    return placeable(pipelines, used, problem.devices_per_node)


def _tilings(candidates: Sequence[ProposedCandidate], num_devices: int) -> Iterator[StrategyCounts]:
    """Every strategy of these candidates that occupies exactly so many devices."""
    if not candidates:
        if not num_devices:
            yield ()
        return
    first, others = candidates[0], candidates[1:]
    for count in range(num_devices // first.num_devices, -1, -1):
        for counts in _tilings(others, num_devices - count * first.num_devices):
            yield ((first, count), *counts) if count else counts
