"""Scheduling on identical machines: jobs with times onto machines so that the last one ends early."""

import heapq
from collections.abc import Sequence


def longest_first(times: Sequence[float], num_machines: int) -> list[list[int]]:
    """Jobs of each machine: the longest job first, each onto the least loaded machine. O(n log n).

    Ends at most 4/3 - 1/(3 m) of the optimum late on m machines (LPT, Graham 1969). Ties keep the order of the input.
    """
    heap = [(0.0, machine) for machine in range(num_machines)]
    jobs: list[list[int]] = [[] for _ in range(num_machines)]
    for job in sorted(range(len(times)), key=lambda place: -times[place]):
        load, machine = heap[0]
        jobs[machine].append(job)
        heapq.heapreplace(heap, (load + times[job], machine))
    return jobs
