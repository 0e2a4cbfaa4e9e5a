"""Lower bounds: deadlines that no dispatch and no packing can meet.

Jobs take shares s_kri(C) of a machine (`shares`), which sum to at most 1 on every machine that ends by C. So for any
prices p >= 0 of types k and kinds of share r,

    sum_i min_k sum_r p_kr s_kri(C)  >  sum_kr p_kr count_k     proves that every schedule ends after C.

Good prices are searched on classes of similar jobs (`prices`); the proof adds up every job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.plan.solve.shop.model import ROUNDING, Machines, Objective, ShopProblem, make_problem
from lengthwise.plan.solve.shop.prices import search_prices
from lengthwise.plan.solve.shop.shares import shares

EXACT_CLASSES = 24
"""The largest jobs, each a class of its own while prices are searched."""
CLASS_RATIO = 0.92
"""Sizes within this ratio make a class."""
ROOT_STEPS = 12
ROOT_TOLERANCE = 4e-5
"""Relative distance to the largest deadline that the prices refute, at which its search ends."""
PROOF_MARGIN = 1e-9
"""Relative excess of a sum over its limit that rounding cannot explain."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """A time before which no schedule ends, and what proves it."""

    bound: float
    prices: np.ndarray
    """[K, kinds] of machine time, one per type and kind of share."""


def certify(
    work: np.ndarray, sizes: np.ndarray, machines: Sequence[Machines], *, objective: Objective = Objective.FLOW_SHOP
) -> Certificate:
    """A time before which no schedule ends; `schedule` proves the same or a later one, and need not do so again.

    Raises:
        ValueError: a job can run on no machine.
    """
    return prove(make_problem(work, sizes, machines, objective=objective))


def prove(problem: ShopProblem) -> Certificate:
    """The bound and the prices that prove it."""
    problem = distinct(problem)
    floor = longest_job(problem)
    classes = merge(problem)
    estimate, prices = search_prices(classes, floor, fluid(classes))
    proven = largest_refuted(problem, prices, floor, estimate)
    return Certificate(uncrowded(problem, proven) * (1 - ROUNDING), prices)


def distinct(problem: ShopProblem) -> ShopProblem:
    """Jobs of equal size and work counted, not listed."""
    changes = np.diff(problem.sizes) != 0
    for row in problem.work:
        changes |= row[1:] != row[:-1]
    starts = np.flatnonzero(np.concatenate([[True], changes]))
    if len(starts) == len(problem.sizes):
        return problem
    counts = np.add.reduceat(problem.counts, starts)
    return _columns(problem, starts, work=problem.work[:, starts], sizes=problem.sizes[starts], counts=counts)


def _columns(
    problem: ShopProblem, columns: np.ndarray, *, work: np.ndarray, sizes: np.ndarray, counts: np.ndarray
) -> ShopProblem:
    return ShopProblem(
        work=work,
        sizes=sizes,
        counts=counts,
        order=problem.order[columns],
        machines=problem.machines,
        objective=problem.objective,
    )


def longest_job(problem: ShopProblem) -> float:
    """Every job takes (work + setup) stages on its best machine, even alone."""
    return float(((problem.work + problem.setup) * (problem.later + 1)).min(axis=0).max())


def fluid(problem: ShopProblem) -> float:
    """About when machines end that share every job in proportion to their speed: near the bound, rather above it."""
    speed = problem.count @ (1 / problem.work)
    forced = (problem.setup * problem.taken / problem.capacity / problem.work).min(axis=0)
    return float((problem.counts / speed * (1 + forced)).sum()) + float(problem.setup.min())


def merge(problem: ShopProblem) -> ShopProblem:
    """Classes of similar jobs, each with the mean of their work: what prices are searched on."""
    starts = _class_starts(problem)
    if len(starts) == len(problem.sizes):
        return problem
    counts = np.add.reduceat(problem.counts, starts)
    work = np.add.reduceat(problem.work * problem.counts, starts, axis=1) / counts
    sizes = np.add.reduceat(problem.sizes * problem.counts, starts) / counts
    return _columns(problem, starts, work=work, sizes=sizes, counts=counts)


def _class_starts(problem: ShopProblem) -> np.ndarray:
    if len(problem.sizes) <= EXACT_CLASSES:
        return np.arange(len(problem.sizes))
    ratio = np.floor(np.log(problem.sizes[EXACT_CLASSES:]) / -np.log(CLASS_RATIO))
    starts = np.flatnonzero(np.diff(ratio, prepend=np.inf)) + EXACT_CLASSES
    return np.concatenate([np.arange(EXACT_CLASSES), starts])


def value(problem: ShopProblem, prices: np.ndarray, deadline: float) -> float:
    """What the jobs pay for the cheapest shares, over what all machines cost; above 1: no schedule ends in time."""
    taken, open_ = shares(problem, deadline)
    cost = np.where(open_, (prices[:, None, :] @ taken)[:, 0, :], np.inf).min(axis=0)
    return float(cost @ problem.counts) / float(problem.count @ prices.sum(axis=1))


def largest_refuted(problem: ShopProblem, prices: np.ndarray, floor: float, estimate: float) -> float:
    """A deadline that these prices refute, about the largest, or `floor`. The value falls about like a power of it."""
    low, high, deadline, power = floor, np.inf, max(estimate, floor), 1.2
    previous: tuple[float, float] | None = None
    for _ in range(ROOT_STEPS):
        now = value(problem, prices, deadline)
        if now > 1 + PROOF_MARGIN:
            low = max(low, deadline)
            if now < 1 + ROOT_TOLERANCE:
                break
        else:
            high = min(high, deadline)
            if deadline <= floor:
                return floor
        if high <= low * (1 + ROOT_TOLERANCE):
            break
        if now < np.inf:
            if previous is not None and abs(np.log(previous[0] / deadline)) > 1e-9:
                slope = np.log(previous[1] / now) / np.log(deadline / previous[0])
                power = float(np.clip(slope, 0.3, 30.0)) if np.isfinite(slope) else power
            previous = (deadline, now)
        target = deadline * min(now, 4.0) ** (1 / power) * (1 - ROOT_TOLERANCE / 4 / power)
        if not low < target < high:
            target = (low + high) / 2 if high < np.inf else low * 1.01
        deadline = target
    return low


def uncrowded(problem: ShopProblem, deadline: float) -> float:
    """The deadline or a later one by which the largest jobs are still too many for the machines that can run them.

    Jobs are counted down to the smallest of each class, to be fast.
    """
    ends = np.append(_class_starts(problem)[1:], len(problem.sizes)) - 1
    ranks = np.cumsum(problem.counts)[ends] * (1 - PROOF_MARGIN)
    problem = _columns(
        problem, ends, work=problem.work[:, ends], sizes=problem.sizes[ends], counts=problem.counts[ends]
    )
    low, step = deadline, ROOT_TOLERANCE
    while _is_crowded(problem, ranks, low * (1 + step)):
        low, step = low * (1 + step), min(max(step * 2, 0.02), 1.0)
    if low == deadline:
        return deadline
    high = low * (1 + step)
    while high > low * (1 + 4 * ROOT_TOLERANCE):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_crowded(problem, ranks, middle) else (low, middle)
    return low


def _is_crowded(problem: ShopProblem, ranks: np.ndarray, deadline: float) -> bool:
    """Pigeonhole: n jobs with shares of at least s fit on a machine only if n s <= 1, and n is an integer.

    Jobs of at least this size share a batch with few of their kind, so each pays a larger part of the setup.
    """
    taken, open_ = shares(problem, deadline)
    taken = taken[:, 0]  # of those that grow with size the one that is mostly largest
    with np.errstate(divide="ignore", invalid="ignore"):
        if problem.setup.any():
            together = np.maximum(np.floor(problem.capacity / problem.taken), 1.0)
            left = deadline - problem.later * (problem.work + problem.setup)
            taken = np.fmax(taken, (problem.work + problem.setup / together) / left)
        fit = np.where(open_, np.floor(1 / taken + PROOF_MARGIN), 0.0)
    return bool((problem.count @ fit < ranks).any())
