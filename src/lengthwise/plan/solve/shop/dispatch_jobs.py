"""Jobs onto machines, in one pass: each where it ends first, or machines filled up to a deadline.

The first mixes long and short jobs on every machine, which balances and packs well. The second groups long jobs with
long ones, which suits machines of several stages: each pays (stages - 1) times its longest job.
"""

import heapq
import math
from bisect import bisect_left, insort
from operator import add

import numpy as np

from lengthwise.plan.solve.shop.model import ROUNDING, Objective, ShopProblem
from lengthwise.plan.solve.shop.shares import capacities, most_batches, shares

FIT_TRIES = 3
"""Machines with room for a job's work that are checked for its size and setups."""


def longest_first(problem: ShopProblem) -> list[list[int]]:
    """Jobs of each machine: the largest first, each where it would end first. One heap per type of machine.

    Ends are those of balanced batches as long as the largest job, and count the setups that sizes force in proportion.
    """
    added = (problem.work + problem.setup * (problem.taken / problem.capacity)).T.tolist()
    alone = ((problem.work + problem.setup) * (problem.later + 1)).tolist()
    idle = {kind: machines.count for kind, machines in enumerate(problem.machines)}
    heaps: list[list[tuple[float, int]]] = [[] for _ in problem.machines]
    first_end = [math.inf] * len(heaps)
    start = _first_machines(problem)
    jobs: list[list[int]] = [[] for _ in range(problem.num_machines)]
    for job, more in enumerate(added):
        ends = list(map(add, first_end, more))
        best = min(ends)
        chosen, fresh = ends.index(best), False
        for kind in idle:
            if alone[kind][job] < best:
                best, chosen, fresh = alone[kind][job], kind, True
        heap = heaps[chosen]
        if fresh:
            machine = start[chosen] + len(heap)
            heapq.heappush(heap, (best, machine))
            idle[chosen] -= 1
            if not idle[chosen]:
                del idle[chosen]
        else:
            machine = heap[0][1]
            heapq.heapreplace(heap, (best, machine))
        first_end[chosen] = heap[0][0]
        jobs[machine].append(job)
    return jobs


def _first_machines(problem: ShopProblem) -> list[int]:
    """Index of the first machine of each type."""
    return [sum(machines.count for machines in problem.machines[:kind]) for kind in range(len(problem.machines))]


def fill(
    problem: ShopProblem, prices: np.ndarray, deadlines: np.ndarray, *, most_over: int
) -> tuple[list[list[int]], list[int]] | None:
    """Jobs of each machine, and those left over: the largest first, on the type that is cheapest at these prices.

    Within a type of several stages, the fullest machine that still ends by the deadline, else one that is idle: long
    jobs meet. With one stage that gains nothing, and the emptiest machine leaves more exchanges to make.

    Args:
        problem: what to dispatch.
        prices: [K, kinds] of `search_prices`.
        deadlines: [K, 1]; earlier for types that are known to pack worse than is estimated here.
        most_over: give up and return None if more jobs than this are left over.
    """
    taken, open_ = shares(problem, deadlines)
    price = np.where(open_, (prices[:, None, :] @ taken)[:, 0, :], np.inf)
    preferred = np.argsort(price, axis=0, kind="stable").T.tolist()
    max_batches = most_batches(problem, deadlines)
    room = np.where(open_, capacities(problem, deadlines, max_batches), 0.0)
    batches = np.where(open_, np.floor(max_batches + ROUNDING), 0.0)
    types = [
        _Filled(problem, kind, (float(deadlines[kind, 0]), room[kind].tolist()), batches[kind])
        for kind in range(len(problem.machines))
    ]
    rows = problem.work.T.tolist()
    over = []
    for job, order in enumerate(preferred):
        row = rows[job]
        for kind in order:
            machine_type = types[kind]
            if row[kind] <= machine_type.most_left and machine_type.take(job, row[kind]):
                break
        else:
            over.append(job)
            if len(over) > most_over:
                return None
    return [jobs for machine_type in types for jobs in machine_type.jobs], over


class _Filled:
    """The machines of one type, sorted by the room left in them."""

    def __init__(self, problem: ShopProblem, kind: int, until: tuple[float, list[float]], batches: np.ndarray) -> None:
        machines = problem.machines[kind]
        self.work, self.sizes = problem.work_rows[kind], problem.taken_rows[kind]
        self.deadline, self.room = until
        self.jobs: list[list[int]] = [[] for _ in range(machines.count)]
        self.left: list[tuple[float, int]] = []
        self.most_left = math.inf
        """No job of more work fits."""
        self.estimate = problem.estimators[kind]
        self.limited = machines.setup > 0 or problem.objective is Objective.MAX_TIMES_COUNT
        """Whether sizes decide too, not only the room for work."""
        self.mixed = machines.stages == 1
        self.forced = problem.objective is Objective.FLOW_SHOP
        self.capacity = machines.capacity
        self.limits = (batches * machines.capacity).tolist() if self.limited else []
        self.held = [0] * machines.count

    def take(self, job: int, value: float) -> bool:
        """Place the job if a machine has room for it."""
        left, size = self.left, self.sizes[job]
        idle = len(left) < len(self.jobs)
        if self.mixed:
            index = len(left) if idle else len(left) - 1
        else:
            index = bisect_left(left, (value, -1))
        if self.limited and index < len(left):
            index = self._with_space(index, -1 if self.mixed else 1, value, size)
        if index < len(left):
            space, machine = left.pop(index)
        else:
            machine, space = len(left), self.room[job]
            if not idle or value > space:
                return False
        insort(left, (space - value, machine))
        if len(left) == len(self.jobs):
            self.most_left = left[-1][0]
        self.jobs[machine].append(job)
        self.held[machine] += size
        return True

    def _with_space(self, index: int, step: int, value: float, size: int) -> int:
        """The first of a few machines from `index` on, up or down, that ends in time with the batches sizes force."""
        for _ in range(FIT_TRIES):
            space, machine = self.left[index]
            total_size = self.held[machine] + size
            if space < value:
                break
            if total_size <= self.capacity:
                return index
            largest = self.jobs[machine][0]
            if not self.forced:
                if total_size <= self.limits[largest]:
                    return index
            elif self.estimate(self.room[largest] - space + value, self.work[largest], total_size) <= self.deadline:
                return index
            index += step
            if not 0 <= index < len(self.left):
                break
        return len(self.left)


def place(problem: ShopProblem, jobs: list[list[int]], over: list[int]) -> None:
    """Add jobs left over: each where it would end first, among the machines of each type that end first until then."""
    if not over:
        return
    work, taken, kinds = problem.work_rows, problem.taken_rows, problem.kinds
    total = [math.fsum([work[kind][job] for job in mine]) for kind, mine in zip(kinds, jobs)]
    sizes_held = [sum([taken[kind][job] for job in mine]) for kind, mine in zip(kinds, jobs)]

    def estimate(machine: int, job: int) -> float:
        """Span with one job more; -1: none."""
        kind, mine = kinds[machine], jobs[machine]
        row = work[kind]
        value, size = (row[job], taken[kind][job]) if job >= 0 else (0.0, 0)
        largest = max(value, row[mine[0]]) if mine else value
        return problem.estimators[kind](total[machine] + value, largest, sizes_held[machine] + size)

    heaps: list[list[tuple[float, int]]] = [[] for _ in problem.machines]
    for machine, kind in enumerate(kinds):
        heaps[kind].append((estimate(machine, -1), machine))
    for heap in heaps:
        heapq.heapify(heap)
    for job in over:
        choices = [(estimate(heap[0][1], job), kind) for kind, heap in enumerate(heaps) if work[kind][job] < math.inf]
        end, kind = min(choices)
        machine = heaps[kind][0][1]
        heapq.heapreplace(heaps[kind], (end, machine))
        insort(jobs[machine], job)
        total[machine] += work[kind][job]
        sizes_held[machine] += taken[kind][job]
