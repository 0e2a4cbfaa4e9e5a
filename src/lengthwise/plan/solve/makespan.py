"""Scheduling on identical machines: jobs with times onto machines so that the last one ends early."""

import heapq
from collections.abc import Sequence

import numpy as np

MAX_IMPROVEMENTS = 200
"""Moves or swaps after which the local search stops; plans must not depend on the wall clock."""


def longest_first(times: np.ndarray, num_machines: int) -> list[list[int]]:
    """Jobs of each machine: longest first onto the least loaded (LPT, Graham 1969), then moves and swaps."""
    heap = [(0.0, machine) for machine in range(num_machines)]
    jobs: list[list[int]] = [[] for _ in range(num_machines)]
    for job in np.argsort(-times, kind="stable").tolist():
        load, machine = heapq.heappop(heap)
        jobs[machine].append(job)
        heapq.heappush(heap, (load + float(times[job]), machine))
    _improve(times, jobs)
    return jobs


def _improve(times: np.ndarray, jobs: list[list[int]]) -> None:
    """Take load off the busiest machine by the best single move or one-for-one swap, while that helps."""
    loads = np.array([times[items].sum() for items in jobs])
    bound = max(float(times.max()), float(times.sum()) / len(jobs)) if len(times) else 0.0
    for _ in range(MAX_IMPROVEMENTS):
        busiest = int(loads.argmax())
        if loads[busiest] <= bound * (1 + 1e-6):
            return
        others = [(machine, job) for machine, items in enumerate(jobs) if machine != busiest for job in items]
        # Swapping a job for "nothing" on some machine is a move.
        partners = np.array([machine for machine, _ in others] + [m for m in range(len(jobs)) if m != busiest])
        if not len(partners):
            return
        given = np.append(times[[job for _, job in others]], np.zeros(len(partners) - len(others)))
        relief = times[jobs[busiest]][:, None] - given[None, :]
        after = np.maximum(loads[busiest] - relief, loads[partners][None, :] + relief)
        after[relief <= 0] = np.inf
        mine, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[mine, other] >= loads[busiest] * (1 - 1e-9):
            return
        target = int(partners[other])
        moved = jobs[busiest].pop(int(mine))
        if other < len(others):
            jobs[target].remove(others[other][1])
            jobs[busiest].append(others[other][1])
        jobs[target].append(moved)
        loads[busiest] -= relief[mine, other]
        loads[target] += relief[mine, other]


def makespan_bound(times: Sequence[float], num_machines: int) -> float:
    """No schedule ends earlier: the mean load, and the pigeonhole bound over the longest jobs.

    Of the k m + 1 longest jobs some machine runs at least k + 1, so it works at least as long as the k + 1 shortest of
    them (Martello and Toth 1990, generalised over k).
    """
    ordered = np.sort(np.asarray(times, dtype=float))[::-1]
    if not len(ordered):
        return 0.0
    bound = float(ordered.sum()) / num_machines
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    for k in range((len(ordered) - 1) // num_machines + 1):
        last = k * num_machines + 1
        bound = max(bound, float(sums[last] - sums[last - k - 1]))
    return bound
