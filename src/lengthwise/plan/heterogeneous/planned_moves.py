"""Moves from a step's fastest strategy that plans of the step confirm, among pipelines that good strategies use.

Strategies are proposed by estimates, of many kinds of pipelines: where estimates are some percent off, or kinds are
many, good ones are missed. Here the kinds are few, and a move counts if the step's plan is faster.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from lengthwise.plan.heterogeneous.adaptive_pipelines import CandidateFamily, families_by_pivot, placed_strategy
from lengthwise.plan.heterogeneous.propose.estimate import Estimator
from lengthwise.plan.heterogeneous.propose.moves import exchanges, merges, refills, splits
from lengthwise.plan.heterogeneous.propose.tiling import Counts, Tiler, strategy_of
from lengthwise.plan.heterogeneous.propose.workload import make_workload
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyPlan, planned_below
from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup, PlacedStrategy
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

SHORTLIST = 12
"""Neighbours of a strategy that are planned at most, the fastest by estimates first."""
UNITS = (1, 2, 4, 8)
"""About so many devices change hands in an exchange."""


def improved(
    priced: PricedBatch, start: StrategyPlan, strategies: Iterable[PlacedStrategy], *, most_plans: int
) -> StrategyPlan:
    """The fastest strategy reached from ``start`` by moves each of which makes the step faster.

    Args:
        priced: the step.
        start: a strategy with its plan.
        strategies: those whose kinds of pipelines are exchanged for one another.
        most_plans: how many neighbours are planned at most.
    """
    used = sum(tile.count * tile.candidate.num_devices for tile in start.strategy.tiles)
    tiles = (tile for strategy in (start.strategy, *strategies) for tile in strategy.tiles)
    candidates = dict.fromkeys([*map(_family_of, tiles), *_of_same_shapes(priced.problem, start.strategy)])
    families = [family for family in candidates if family.num_devices <= used]
    longest = int(priced.lengths.max())
    problem = replace(priced.problem, samples=(priced.lengths,), max_length=longest, num_devices=used)
    workload = make_workload(problem, families, problem.samples)
    tiler, estimator = Tiler(workload, problem.devices_per_node), Estimator(workload, problem.objective)
    present, best, seen = _counts_of(start.strategy, families), start, set[Counts]()
    tiler.may_cross = not tiler.is_placeable(present)
    while True:
        seen.add(present)
        for new in _likely_first(tiler, estimator, present, longest, seen)[:most_plans]:
            seen.add(new)
            most_plans -= 1
            planned = planned_below(placed_strategy(priced.problem, strategy_of(families, new)), priced, best.time_s)
            if planned is not None:
                present, best = new, planned
                break
        else:
            return best


def _likely_first(
    tiler: Tiler, estimator: Estimator, present: Counts, longest: int, seen: Collection[Counts]
) -> list[Counts]:
    """Neighbours of a strategy that are new and hold the longest sequence, few, the fastest by estimates first."""
    every = dict.fromkeys(
        new
        for moved in (
            *(exchanges(tiler, present, unit) for unit in UNITS),
            *(move(tiler, present, 1) for move in (refills, splits, merges)),
        )
        for new in moved
    )
    fitting = [new for new in every if new not in seen and tiler.max_length(new) >= longest and tiler.is_placeable(new)]
    if not fitting:
        return []
    counts = np.array(fitting)
    updates_s = np.where(counts > 0, tiler.workload.update_s, 0.0).max(axis=1)
    order = np.argsort(estimator.times_s(counts)[:, 0] + updates_s, kind="stable")
    return [fitting[row] for row in order[:SHORTLIST].tolist()]


def _of_same_shapes(problem: PlanningProblem, strategy: PlacedStrategy) -> list[CandidateFamily]:
    """Families of the search space whose pipelines have as many devices and stages as some of the strategy's."""
    shapes = {_shape_of(tile.candidate) for tile in strategy.tiles}
    of_shapes = (members for members in problem.families.values() if _shape_of(members[0]) in shapes)
    return [family for members in of_shapes for family in families_by_pivot(members)]


def _shape_of(candidate: Candidate) -> tuple[int, int]:
    return candidate.num_devices, candidate.num_stages


def _family_of(tile: PipelineGroup) -> CandidateFamily:
    return CandidateFamily(pivot=tile.candidate, leaner=tile.leaner)


def _counts_of(strategy: PlacedStrategy, families: Sequence[CandidateFamily]) -> Counts:
    """Pipelines of each family that the strategy has."""
    counts = dict.fromkeys(families, 0)
    for tile in strategy.tiles:
        counts[_family_of(tile)] += tile.count
    return tuple(counts.values())
