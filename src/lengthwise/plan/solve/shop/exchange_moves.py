"""Between machines: take time off the machine that ends last, by moving a job away or swapping it."""

import math
from bisect import insort
from collections.abc import Callable, Iterator

import numpy as np

from lengthwise.plan.solve.shop.model import ShopProblem
from lengthwise.plan.solve.shop.pack import Batches, pack

PARTNERS = 4
"""Most machines of each type that are looked at: those that end first."""
PARTNER_JOBS = 96
"""Jobs of all those machines together, roughly."""
PROPOSALS = 16
"""Exchanges, the most promising first, that are estimated until one helps."""
TRIES = 8
"""Of these, how many are packed if their estimates say that they help."""

MOST_JOBS = 10_000
"""Jobs of a problem up to which every pair of jobs of two machines may be exchanged;"""
MOST_PAIRS = 1 << 20
"""beyond, this many pairs are looked at: of jobs of different size, at even distances."""

EVEN = 1e-3
"""Relative distance of the last end from the mean at which there is nothing left to even out."""
LEAST_GAIN = 1e-4
"""Relative gain for which an exchange is made."""

Evaluate = Callable[[int, list[int], float], tuple[float, Batches]]
"""Span and batches of a machine of a type that holds the given jobs; content with a span of the last argument."""


class Assignment:
    """Jobs of every machine, with the span of each as far as it is known."""

    def __init__(self, problem: ShopProblem, jobs: list[list[int]], evaluate: Evaluate) -> None:
        self.problem = problem
        self.jobs = jobs
        self.first = np.cumsum([0] + [machines.count for machines in problem.machines])
        # One more column for "no job".
        self.work = np.concatenate([problem.work, np.zeros((len(problem.machines), 1))], axis=1)
        self._sums = [self._sums_of(machine) for machine in range(len(jobs))]
        self.evaluate(evaluate, 0.0)

    @property
    def makespan(self) -> float:
        """When the last machine ends."""
        return float(self.spans.max())

    def lightest(self) -> list[int]:
        """A few machines of each type that end first."""
        few = min(max(PARTNER_JOBS * len(self.jobs) // len(self.problem.sizes), 1), PARTNERS)
        chosen: list[int] = []
        for start, end in zip(self.first.tolist(), self.first[1:].tolist()):
            part = self.spans[start:end]
            lightest = np.argpartition(part, few)[: few + 1].tolist() if end - start > few + 1 else range(end - start)
            chosen.extend(sorted(start + offset for offset in lightest))
        return chosen

    def estimate_after(self, machine: int, leaves: int, comes: int) -> float:
        """Span of a machine as if batches could be balanced, once a job leaves and another comes; -1: none."""
        problem, jobs, kind = self.problem, self.jobs[machine], self.problem.kinds[machine]
        work, taken = problem.work_rows[kind], problem.taken_rows[kind]
        total, size = self._sums[machine]
        largest = jobs[0] if jobs else comes
        if leaves >= 0:
            total, size = total - work[leaves], size - taken[leaves]
            if leaves == largest:
                largest = jobs[1] if len(jobs) > 1 else comes
        if comes >= 0:
            total, size, largest = total + work[comes], size + taken[comes], min(largest, comes)
        return problem.estimators[kind](total, work[largest], size) if largest >= 0 else 0.0

    def put(self, machine: int, jobs: list[int], span: float, batches: Batches) -> None:
        """Give a machine other jobs, whose span and batches are known."""
        self.jobs[machine], self.batches[machine], self.spans[machine] = jobs, batches, span
        self._sums[machine] = self._sums_of(machine)

    def _sums_of(self, machine: int) -> tuple[float, int]:
        """Total work and size of a machine's jobs."""
        jobs, kind = self.jobs[machine], self.problem.kinds[machine]
        work, taken = self.problem.work_rows[kind], self.problem.taken_rows[kind]
        return sum([work[job] for job in jobs]), sum([taken[job] for job in jobs])

    def evaluate(self, evaluate: Evaluate, enough: float) -> None:
        """Find the span of every machine anew."""
        evaluated = [evaluate(kind, jobs, enough) for kind, jobs in zip(self.problem.kinds, self.jobs)]
        self.spans = np.array([span for span, _ in evaluated])
        self.batches = [batches for _, batches in evaluated]


def estimating(problem: ShopProblem) -> Evaluate:
    """Spans as if batches could be balanced."""
    work, taken = problem.work_rows, problem.taken_rows

    def evaluate(kind: int, jobs: list[int], enough: float) -> tuple[float, Batches]:
        if not jobs:
            return 0.0, []
        row = work[kind]
        total, size = sum([row[job] for job in jobs]), sum([taken[kind][job] for job in jobs])
        return problem.estimators[kind](total, row[jobs[0]], size), []

    return evaluate


def packing(problem: ShopProblem, *, swaps: int) -> Evaluate:
    """Spans of batches, found with little effort once they are at most `enough`."""
    work, taken = problem.work_rows, problem.taken_rows

    def evaluate(kind: int, jobs: list[int], enough: float) -> tuple[float, Batches]:
        row, machines, objective = work[kind], problem.machines[kind], problem.objective
        return pack(
            [row[job] for job in jobs],
            [taken[kind][job] for job in jobs],
            machines,
            objective=objective,
            enough=enough,
            swaps=swaps,
        )

    return evaluate


def exchange(assignment: Assignment, evaluate: Evaluate, *, goal: float, budget: int) -> None:
    """While the last machine ends after `goal`: the first of the most promising exchanges that makes it end earlier.

    A machine that becomes the last is first tried to be packed better.
    """
    tried: set[int] = set()
    while budget > 0:
        worst = int(assignment.spans.argmax())
        last = float(assignment.spans[worst])
        if last <= goal or last - float(assignment.spans.mean()) <= EVEN * last:
            return
        if worst not in tried:
            tried.add(worst)
            budget -= len(assignment.jobs[worst])
            span, batches = evaluate(assignment.problem.kinds[worst], assignment.jobs[worst], goal)
            if span < assignment.spans[worst]:
                assignment.spans[worst], assignment.batches[worst] = span, batches
                continue
        used, partner = _improve(assignment, evaluate, worst, budget)
        if partner < 0:
            return
        tried -= {worst, partner}
        budget -= used


def _improve(assignment: Assignment, evaluate: Evaluate, worst: int, budget: int) -> tuple[int, int]:
    """Jobs of machines that were evaluated, and partner of the exchange that was made or -1."""
    limit = float(assignment.spans[worst]) * (1 - LEAST_GAIN)
    kinds, used, tries = assignment.problem.kinds, 0, 0
    for partner, mine, theirs in _proposals(assignment, worst):
        if used >= budget or tries >= TRIES:
            break
        used += 1
        if assignment.estimate_after(partner, theirs, mine) > limit:
            continue
        if assignment.estimate_after(worst, mine, theirs) > limit:
            continue
        ours, others = list(assignment.jobs[worst]), list(assignment.jobs[partner])
        ours.remove(mine)
        insort(others, mine)
        if theirs >= 0:
            others.remove(theirs)
            insort(ours, theirs)
        tries += 1
        used += len(ours)
        span, batches = evaluate(kinds[worst], ours, limit)
        if span > limit:
            continue
        used += len(others)
        other_span, other_batches = evaluate(kinds[partner], others, limit)
        if other_span > limit:
            continue
        assignment.put(worst, ours, span, batches)
        assignment.put(partner, others, other_span, other_batches)
        return used, partner
    return used, -1


def _few_jobs(assignment: Assignment, worst: int, partners: list[int]) -> dict[int, list[int]]:
    """The jobs of a machine and its partners, in a large problem so few of each that their pairs are not too many.

    The largest two stay: the span depends on them apart.
    """
    jobs = {machine: assignment.jobs[machine] for machine in (worst, *partners)}
    sizes = assignment.problem.sizes
    if len(sizes) <= MOST_JOBS:
        return jobs
    max_jobs = math.isqrt(MOST_PAIRS // len(partners))
    return {machine: _thinned(machine_jobs, sizes, max_jobs) for machine, machine_jobs in jobs.items()}


def _thinned(jobs: list[int], sizes: np.ndarray, max_jobs: int) -> list[int]:
    """At most about ``max_jobs`` of some jobs, of different size and at even distances, the largest two among them."""
    array = np.array(jobs)
    if len(array) <= 2:
        return jobs
    firsts = array[np.concatenate([[True, True], np.diff(sizes[array[1:]]) != 0])]
    if len(firsts) <= max_jobs:
        return [jobs[0], *firsts[1:].tolist()]
    places = np.unique(np.linspace(1, len(firsts) - 1, max_jobs).round().astype(np.int64))
    return [jobs[0], *firsts[places].tolist()]


def _proposals(assignment: Assignment, worst: int) -> Iterator[tuple[int, int, int]]:
    """Partner, job given to it and job taken from it (-1: none), by the larger of both spans to first order.

    To first order a span changes by the work that comes and goes, and by (stages - 1) times the change of the longest.
    """
    problem, spans, work = assignment.problem, assignment.spans, assignment.work
    kind, later = problem.kinds[worst], problem.later
    partners = [machine for machine in assignment.lightest() if machine != worst]
    if not partners:
        return
    jobs = _few_jobs(assignment, worst, partners)
    mine, lengths = np.array(jobs[worst]), [len(jobs[machine]) + 1 for machine in partners]
    theirs = np.array([job for machine in partners for job in (*jobs[machine], -1)])
    kinds = np.array([problem.kinds[machine] for machine in partners])
    largest = np.array([jobs[machine][0] if jobs[machine] else -1 for machine in partners])
    second = np.array([jobs[machine][1] if len(jobs[machine]) > 1 else -1 for machine in partners])
    ends = np.cumsum(lengths)
    owner = np.repeat(np.arange(len(partners)), lengths)
    # What remains the longest there once a job is taken away: the second if it is the first.
    longest = np.repeat(work[kinds, largest], lengths)
    heads = ends - np.array(lengths)
    remaining = longest.copy()
    remaining[heads] = work[kinds, second]
    types = kinds[owner]
    stages = later[types, 0]
    received = work.T[mine][:, types]
    after = received + (spans[partners][owner] - work[types, theirs] - stages * longest)
    if stages.any():
        with np.errstate(invalid="ignore"):
            after += stages * np.maximum(received, remaining)
    work_here = work[kind]
    taken = work_here[theirs]
    left = (spans[worst] - work_here[mine])[:, None] + taken
    if later[kind, 0]:
        next_longest = np.full(len(mine), work_here[mine[0]])
        next_longest[0] = work_here[mine[1]] if len(mine) > 1 else 0.0
        left += later[kind, 0] * (np.maximum(next_longest[:, None], taken) - work_here[mine[0]])
    flat = np.maximum(after, left).ravel()
    flat[np.isnan(flat)] = np.inf  # 0 stages times an infinite work
    best = np.argpartition(flat, PROPOSALS)[:PROPOSALS] if len(flat) > PROPOSALS else np.arange(len(flat))
    best = best[np.lexsort((best, flat[best]))]
    for index in best[flat[best] < np.inf].tolist():
        row, column = divmod(index, len(theirs))
        yield partners[int(owner[column])], int(mine[row]), int(theirs[column])
