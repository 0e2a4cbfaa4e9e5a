"""Schedule jobs on machines of several types: dispatch, pack, improve, certify."""

import math
from collections.abc import Sequence

import numpy as np

from lengthwise.plan.solve.shop.dispatch_jobs import fill, longest_first, place
from lengthwise.plan.solve.shop.exact import exact
from lengthwise.plan.solve.shop.exchange_moves import Assignment, estimating, exchange, packing
from lengthwise.plan.solve.shop.lower_bound import Certificate, prove
from lengthwise.plan.solve.shop.model import (
    ROUNDING,
    Machines,
    Objective,
    SearchEffort,
    ShopProblem,
    ShopSchedule,
    make_problem,
    span,
)
from lengthwise.plan.solve.shop.pack import Batches
from lengthwise.plan.solve.shop.settle_pairs import settle_pairs

FIRST_STRETCH = 0.01
"""Relative distance from the bound of the first deadline that machines are filled to."""
NEARLY = 1.02
"""A dispatch by longest first within this factor of the bound is improved before others are made."""
WORTH_FILLING = 1.005
"""Machines are filled if longest first ends later than this many times the bound."""
WORTH_REFILLING = 1.03
"""Machines are filled again if those of some type end later than estimated by this factor on average."""
HOPEFUL = 1.03
"""A dispatch is pursued if its estimate is at most this many times the best packed makespan, or 1 / jobs more: with few
jobs, packing decides."""


def schedule(
    work: np.ndarray,
    sizes: np.ndarray,
    machines: Sequence[Machines],
    *,
    objective: Objective = Objective.FLOW_SHOP,
    certificate: Certificate | None = None,
    effort: SearchEffort | None = None,
) -> ShopSchedule:
    """Every job in one batch of one machine, so that the last machine ends early; deterministic.

    Args:
        work: [K types, B jobs] time that a job adds to a batch; inf where it may not run. Does not decrease with size.
        sizes: [B] what a job takes of the capacity of a batch.
        machines: K types of machine.
        objective: when a machine ends its batches.
        certificate: what `certify` returned for these inputs, if it is known; it is not proven again.
        effort: budgets of the search.

    Raises:
        ValueError: a job can run on no machine.
    """
    problem = make_problem(work, sizes, machines, objective=objective)
    effort = effort or SearchEffort()
    certificate = certificate or prove(problem)
    bound, prices = certificate.bound, certificate.prices
    goal = bound * (1 + effort.tolerance)
    mixed = Assignment(problem, longest_first(problem), estimating(problem))
    if mixed.makespan <= bound * NEARLY:
        exchange(mixed, estimating(problem), goal=goal, budget=effort.exchanged_jobs)
    candidates = [mixed]
    if mixed.makespan > bound * WORTH_FILLING and effort.fills:
        candidates.append(_fill(problem, prices, between=(bound, mixed.makespan), effort=effort))
    candidates.sort(key=lambda assignment: assignment.makespan)
    best = candidates[0]
    _improve(best, math.inf, goal, effort)
    hopeful = HOPEFUL + 1 / len(problem.sizes)
    for other in candidates[1:]:
        if best.makespan > goal and other.makespan < best.makespan * hopeful:
            _improve(other, best.makespan, goal, effort)
            best = min(best, other, key=lambda assignment: assignment.makespan)
    for _ in range(effort.refills if len(machines) > 1 and effort.fills else 0):
        excess = _excess(best)
        if best.makespan <= bound * WORTH_FILLING or (len(candidates) > 1 and excess.max() < WORTH_REFILLING):
            break
        other = _fill(problem, prices, between=(bound, best.makespan), effort=effort, excess=excess)
        _pack(other, goal, effort)
        best = min(best, other, key=lambda assignment: assignment.makespan)
    if best.makespan > goal and len(problem.sizes) <= effort.exact_jobs:
        optimum, jobs, batches = exact(problem)
        return _finish(problem, jobs, batches, max(bound, optimum * (1 - ROUNDING)))
    if len(problem.sizes) <= effort.paired_jobs:
        settle_pairs(best, goal=goal, most_jobs=effort.exact_jobs, most_pairs=effort.exact_pairs)
    return _finish(problem, best.jobs, best.batches, bound)


def _improve(assignment: Assignment, incumbent: float, goal: float, effort: SearchEffort) -> None:
    """Exchange on estimated spans, pack, exchange on packed spans; not further once it cannot beat the incumbent."""
    problem = assignment.problem
    exchange(assignment, estimating(problem), goal=goal, budget=effort.exchanged_jobs)
    if assignment.makespan >= incumbent:
        return
    _pack(assignment, goal, effort)


def _pack(assignment: Assignment, goal: float, effort: SearchEffort) -> None:
    """Pack, exchange on packed spans."""
    problem = assignment.problem
    assignment.evaluate(packing(problem, swaps=0), max(goal, assignment.makespan))
    budget = max(effort.packed_jobs, len(problem.sizes))
    exchange(assignment, packing(problem, swaps=effort.swaps), goal=goal, budget=budget)


def _excess(packed: Assignment) -> np.ndarray:
    """[K, 1] mean factor by which the machines of each type end later than estimated."""
    problem, estimate = packed.problem, estimating(packed.problem)
    estimates = np.array([estimate(kind, jobs, 0.0)[0] for kind, jobs in zip(problem.kinds, packed.jobs)])
    ends, ideal = np.add.reduceat(packed.spans, packed.first[:-1]), np.add.reduceat(estimates, packed.first[:-1])
    return np.maximum(ends / np.where(ideal > 0, ideal, np.inf), 1.0)[:, None]


def _fill(
    problem: ShopProblem,
    prices: np.ndarray,
    *,
    between: tuple[float, float],
    effort: SearchEffort,
    excess: np.ndarray | None = None,
) -> Assignment:
    """The best of dispatches filled up to deadlines between a bound and a makespan; `excess` [K, 1] leaves time."""
    proven, high = between
    excess = np.ones((len(problem.machines), 1)) if excess is None else excess
    num_jobs = len(problem.sizes)
    low, deadline, best = proven, proven * (1 + FIRST_STRETCH), None
    rounds = min(effort.fills, max(2, effort.filled_jobs // num_jobs))
    for left in reversed(range(rounds)):
        last_chance = not left and best is None
        most_over = num_jobs if last_chance else problem.num_machines
        filled = fill(problem, prices, deadline / excess, most_over=most_over)
        failed = filled is None or bool(filled[1])
        if filled is not None:
            jobs, over = filled
            place(problem, jobs, over)
            assignment = Assignment(problem, jobs, estimating(problem))
            best = min(best or assignment, assignment, key=lambda other: other.makespan)
            high = min(high, assignment.makespan)
        if not failed and low == proven:
            break
        low, high = (deadline, high) if failed else (low, deadline)
        deadline = min((low + high) / 2, proven + 3 * (deadline - proven))
    assert best is not None
    return best


def _finish(problem: ShopProblem, jobs: list[list[int]], packed: list[Batches], bound: float) -> ShopSchedule:
    """In the caller's indices, with spans from exactly rounded sums."""
    order = problem.order.tolist()
    all_batches, spans = [], []
    for kind, mine, batches in zip(problem.kinds, jobs, packed):
        machines, row = problem.machines[kind], problem.work_rows[kind]
        members = [[mine[index] for index in batch] for batch in batches]
        timed = [
            (-math.fsum([row[job] for job in batch]) - machines.setup, [order[job] for job in batch])
            for batch in members
        ]
        timed.sort()
        all_batches.append(tuple([tuple(batch) for _, batch in timed]))
        spans.append(span([-time for time, _ in timed], machines.stages, problem.objective))
    makespan = max(spans)
    return ShopSchedule(
        batches=tuple(all_batches), spans=tuple(spans), makespan=makespan, lower_bound=min(bound, makespan)
    )
