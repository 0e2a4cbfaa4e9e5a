"""The machine that ends last and one other, dispatched and packed anew in the best of all ways, while that helps."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lengthwise.plan.solve.shop.exact import exact
from lengthwise.plan.solve.shop.exchange_moves import LEAST_GAIN, Assignment
from lengthwise.plan.solve.shop.model import ShopProblem, span
from lengthwise.plan.solve.shop.pack import Batches

Settled = tuple[list[int], float, Batches]
"""Jobs of a machine, its span and its batches."""


def settle_pairs(assignment: Assignment, *, goal: float, most_jobs: int, most_pairs: int) -> None:
    """Settle pairs of machines that hold at most ``most_jobs`` jobs, ``most_pairs`` times at most.

    Single moves and swaps leave a machine last where only several at once would help: with a handful of jobs, that is
    most of what is lost.
    """
    while most_pairs > 0 and assignment.makespan > goal:
        worst = int(assignment.spans.argmax())
        limit = assignment.makespan * (1 - LEAST_GAIN)
        for partner in _partners(assignment, worst, most_jobs):
            most_pairs -= 1
            settled = _settled(assignment.problem, assignment.jobs, (worst, partner))
            if max(ends for _, ends, _ in settled) <= limit:
                for machine, (jobs, ends, batches) in zip((worst, partner), settled):
                    assignment.put(machine, jobs, ends, batches)
                break
            if not most_pairs:
                return
        else:
            return


def _partners(assignment: Assignment, worst: int, most_jobs: int) -> Iterator[int]:
    """Machines that hold few enough jobs together with the last one: of each type, the first of those alike."""
    for partner in np.argsort(assignment.spans, kind="stable").tolist():
        if partner != worst and 1 < len(assignment.jobs[worst]) + len(assignment.jobs[partner]) <= most_jobs:
            yield partner


def _settled(problem: ShopProblem, jobs: list[list[int]], machines: tuple[int, int]) -> list[Settled]:
    """The best dispatch and packing of all jobs of two machines."""
    members = sorted(job for machine in machines for job in jobs[machine])
    kinds = [problem.kinds[machine] for machine in machines]
    pair = ShopProblem(
        work=problem.work[kinds][:, members],
        sizes=problem.sizes[members],
        counts=np.ones(len(members)),
        order=np.arange(len(members)),
        machines=tuple(replace(problem.machines[kind], count=1) for kind in kinds),
        objective=problem.objective,
    )
    _, parts, packed = exact(pair)
    settled = []
    for kind, (part, batches) in enumerate(zip(parts, packed)):
        machine, row = pair.machines[kind], pair.work_rows[kind]
        times = [sum([row[part[index]] for index in batch]) + machine.setup for batch in batches]
        ends = span(times, machine.stages, problem.objective) if times else 0.0
        settled.append(([members[job] for job in part], ends, batches))
    return settled
