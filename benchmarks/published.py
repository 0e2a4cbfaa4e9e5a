"""Published planners, written anew: Hydraulis' Algorithm 1 and Eq. (1), DCP's accumulation, ParaDySe's Algorithm 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cells import Instance

from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.shop import Machines

TRIALS = 100
MOST_COUNTS = 16
"""Numbers of micro-batches that the published code tries per pipeline."""
OVER_TARGET = 1.2
"""Weight of seconds above the target in DCP's search."""

Solver = Callable[[np.ndarray, np.ndarray, int, int], list[int] | None]
"""Works, sizes, capacity and number of bins -> bin of each item, the fullest of them as light as it can; or None."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the published pipeline makes of an instance."""

    jobs: tuple[tuple[int, ...], ...]
    """Of each machine."""
    makespan: float
    """Eq. (1), the slowest pipeline."""
    unsolved: int
    """Pipelines for which no integer program found anything in time; they are packed first-fit decreasing."""


def dispatch(instance: Instance, *, trials: int = TRIALS, as_shipped: bool = False) -> list[list[int]]:
    """Hydraulis, Algorithm 1: random orders, each sequence to the pipeline that raises the slowest least; the best.

    Args:
        instance: machine types in the order of decreasing capacity.
        trials: random orders.
        as_shipped: as its authors' code, which places sequences that only the first type holds before all others, and
            of pipelines that do equally well prefers an empty one.
    """
    kinds = np.array(instance.candidates)
    later = np.array([[each.stages - 1] for each in instance.machines])
    waits = later * np.where(np.isfinite(instance.work), instance.work, 0.0)
    orders = _orders(instance, trials, as_shipped=as_shipped)
    rows = np.arange(trials)
    load, extra = np.zeros((trials, len(kinds))), np.zeros((trials, len(kinds)))
    chosen = np.empty_like(orders)
    for step in range(orders.shape[1]):
        jobs_now = orders[:, step]
        more = load + instance.work[:, jobs_now].T[:, kinds]
        longest = np.maximum(extra, waits[:, jobs_now].T[:, kinds])
        raised = np.maximum(more + longest, _largest_other(load + extra))
        place = raised.argmin(axis=1)
        if as_shipped:
            ties = (raised <= raised[rows, place][:, None]) & (load == 0)
            place = np.where(ties.any(axis=1), ties.argmax(axis=1), place)
        load[rows, place], extra[rows, place] = more[rows, place], longest[rows, place]
        chosen[:, step] = place
    best = int((load + extra).max(axis=1).argmin())
    jobs: list[list[int]] = [[] for _ in kinds]
    for job, machine in zip(orders[best].tolist(), chosen[best].tolist()):
        jobs[machine].append(job)
    return jobs


def _orders(instance: Instance, trials: int, *, as_shipped: bool) -> np.ndarray:
    """[trials, jobs] in which jobs are placed."""
    jobs = np.arange(instance.work.shape[1])
    only_first = ~np.isfinite(instance.work[1:]).any(axis=0) & as_shipped & (len(instance.machines) > 1)
    first, rest = jobs[only_first], jobs[~only_first]
    return np.stack([np.concatenate([first, np.random.default_rng(seed).permutation(rest)]) for seed in range(trials)])


def _largest_other(values: np.ndarray) -> np.ndarray:
    """For each entry of a row, the largest of the others."""
    if values.shape[1] == 1:
        return np.full_like(values, -np.inf)
    top = values.argmax(axis=1)
    rows = np.arange(len(values))
    others = np.repeat(values[rows, top][:, None], values.shape[1], axis=1)
    rest = values.copy()
    rest[rows, top] = -np.inf
    others[rows, top] = rest.max(axis=1)
    return others


def pack(work: np.ndarray, sizes: np.ndarray, machines: Machines, solve: Solver) -> tuple[list[list[int]], bool]:
    """Hydraulis, Eq. (1), for one pipeline: an integer program for each number of micro-batches; and if any was solved.

    Numbers from what the capacity forces to what UtilLen allows, at most ``MOST_COUNTS`` of them, spread evenly.
    """
    tokens = int(sizes.sum())
    fewest = max(1, -(-tokens // machines.capacity))
    most = max(fewest, min(len(work), tokens // machines.min_fill))
    counts = np.unique(np.linspace(fewest, most, min(MOST_COUNTS, most - fewest + 1)).astype(int)).tolist()
    best, best_s = first_fit_decreasing(sizes.tolist(), machines.capacity), np.inf
    for count in counts:
        bins = solve(work, sizes, machines.capacity, count)
        if bins is None:
            continue
        batches = [[job for job, held in enumerate(bins) if held == number] for number in range(count)]
        batches = [batch for batch in batches if batch]
        span_s = eq1_s(work, batches, machines)
        best, best_s = (batches, span_s) if span_s < best_s else (best, best_s)
    return best, best_s < np.inf


def eq1_s(work: np.ndarray, batches: Sequence[Sequence[int]], machines: Machines) -> float:
    """Eq. (1): every micro-batch as long as the longest."""
    longest = max(float(work[list(batch)].sum()) for batch in batches)
    return (longest + machines.setup) * (machines.stages - 1 + len(batches))


def plan(instance: Instance, solve: Solver, *, as_shipped: bool = True) -> Published:
    """Dispatch, then packing of every pipeline."""
    jobs = dispatch(instance, as_shipped=as_shipped)
    makespan, unsolved = 0.0, 0
    for kind, mine in zip(instance.candidates, jobs):
        if not mine:
            continue
        work, machines = instance.work[kind, mine], instance.machines[kind]
        batches, solved = pack(work, instance.sizes[mine], machines, solve)
        makespan = max(makespan, eq1_s(work, batches, machines))
        unsolved += not solved
    return Published(jobs=tuple(map(tuple, jobs)), makespan=makespan, unsolved=unsolved)


def accumulation(times_s: np.ndarray, most: int) -> np.ndarray:
    """DCP-inter's counts: for every multiple of a group's time as target, the nearest multiples; the nearest of all.

    Distances are seconds, those above the target weigh more, and no group takes longer than ``most`` micro-batches of
    the slowest (DCP, appendix C and its code).
    """
    limit_s = times_s.max() * most
    up_to = np.floor(limit_s / times_s * (1 + 1e-12)).astype(int)
    best, best_distance = np.ones(len(times_s), dtype=int), np.inf
    for time_s, highest in zip(times_s, up_to):
        for target_s in time_s * np.arange(1, highest + 1):
            below = np.clip(np.floor(target_s / times_s), 1, up_to)
            above = np.minimum(below + 1, up_to)
            low, high = _distance(below * times_s, target_s), _distance(above * times_s, target_s)
            total = float(np.minimum(low, high).sum())
            if total < best_distance:
                best, best_distance = np.where(low <= high, below, above).astype(int), total
    return best


def _distance(times_s: np.ndarray, target_s: float) -> np.ndarray:
    late_s = times_s - target_s
    return np.where(late_s > 0, OVER_TARGET * late_s, -late_s)


def layer_methods(
    times_s: Sequence[float], num_bytes: Sequence[float], *, num_layers: int, budget: float, resets: bool = False
) -> list[int]:
    """ParaDySe's Algorithm 1: the method of each layer, methods numbered as given.

    Methods are tried by rising time. As printed, ``strategies`` is not reset for the next k, so that later exchanges
    start from what the last one left; ``resets`` puts that right. Options are copied when they are kept, which its
    code does not do.
    """
    order = sorted(range(len(times_s)), key=lambda method: (times_s[method], num_bytes[method]))
    useful: list[int] = []
    for method in order:  # line 1: what another beats in time and bytes is left out
        if not useful or num_bytes[method] < num_bytes[useful[-1]]:
            useful.append(method)
    options: list[list[int]] = []
    for number, method in enumerate(useful):
        strategies = [method] * num_layers
        if sum(num_bytes[m] for m in strategies) <= budget:
            if number == 0:
                return strategies
            options.append(list(strategies))
            continue
        for other in useful[number + 1 :]:
            strategies = [method] * num_layers if resets else strategies
            for _ in range(num_layers):
                strategies = [*strategies[1:], other]
                if sum(num_bytes[m] for m in strategies) <= budget:
                    options.append(list(strategies))
    if options:
        return min(options, key=lambda strategies: sum(times_s[m] for m in strategies))
    return [min(useful, key=lambda method: num_bytes[method])] * num_layers
