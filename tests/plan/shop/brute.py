"""The definition of the problem, tried out: every dispatch and every partition of a few jobs."""

import math
from functools import cache

import numpy as np

from lengthwise.plan.solve.shop import Machines, Objective


@cache
def partitions(mask):
    """All partitions of a set of jobs, a bit mask, into batches."""
    if not mask:
        return ((),)
    first = mask & -mask
    rest = mask ^ first
    together = [others for others in range(rest + 1) if not others & ~rest]
    return tuple((first | others, *more) for others in together for more in partitions(rest ^ others))


@cache
def members(mask):
    return tuple(job for job in range(mask.bit_length()) if mask >> job & 1)


def span_of(times, stages, objective):
    """When a machine ends whose batches take these times, from the two formulas."""
    if not times:
        return 0.0
    if objective is Objective.FLOW_SHOP:
        return sum(times) + (stages - 1) * max(times)
    return (stages - 1 + len(times)) * max(times)


def best_packings(row, sizes, machines, objective):
    """Per set of jobs: the least span, and the least with no more batches than `min_fill` or capacity asks for."""
    free, kept = [], []
    masks = range(1 << len(sizes))
    time = [sum(row[job] for job in members(mask)) + machines.setup for mask in masks]
    limit = machines.capacity if machines.takes_larger else math.inf
    size = [sum(min(sizes[job], limit) for job in members(mask)) for mask in masks]
    for mask in masks:
        fitting = [
            batches
            for batches in (partitions(mask) if time[mask] < math.inf else ())
            if all(size[each] <= machines.capacity for each in batches)
        ]
        spans = [
            (span_of([time[each] for each in batches], machines.stages, objective), len(batches)) for batches in fitting
        ]
        most = max(min((count for _, count in spans), default=0), size[mask] // machines.min_fill, 1)
        free.append(min((span for span, _ in spans), default=math.inf))
        kept.append(min((span for span, count in spans if count <= most), default=math.inf))
    return free, kept


def least_makespan(packings, machines):
    """Over all dispatches, given the least span of each set of jobs on each type."""
    everything = len(packings[0]) - 1
    ends = [0.0 if not mask else math.inf for mask in range(everything + 1)]
    for kind, each in enumerate(machines):
        for _ in range(each.count):
            ends = [
                min(max(ends[mask ^ mine], packings[kind][mine]) for mine in range(mask + 1) if not mine & ~mask)
                for mask in range(everything + 1)
            ]
    return ends[everything]


def optima(work, sizes, machines, objective):
    """Least makespan of all schedules, and of those that respect `min_fill`."""
    found = [best_packings(row, sizes, each, objective) for row, each in zip(work, machines)]
    return tuple(least_makespan([each[which] for each in found], machines) for which in (0, 1))


def random_instance(rng):
    """Up to six jobs on up to three machines of up to three types; with ties, idle machines, jobs too large."""
    kinds = int(rng.integers(1, 4))
    counts = rng.multinomial(int(rng.integers(kinds, 4)) - kinds, np.ones(kinds) / kinds) + 1
    with_setup = rng.random() < 0.5
    machines = [
        Machines(
            count=int(count),
            stages=int(rng.choice([1, 1, 2, 4])),
            setup=float(rng.choice([0, 5, 40, 100])) if with_setup else 0.0,
            capacity=int(rng.choice([2000, 4000, 8000, 12000])),
            min_fill=int(rng.choice([1, 200, 500, 1000])),
            takes_larger=bool(rng.random() < 0.2),
        )
        for count in counts
    ]
    num_jobs = int(rng.choice([1, 2, 3, 4, 5, 6], p=[0.05, 0.1, 0.15, 0.2, 0.25, 0.25]))
    largest = max(each.capacity for each in machines)
    style = rng.integers(0, 5)
    if style == 0:
        sizes = np.full(num_jobs, int(rng.integers(50, largest)))
    elif style == 1:
        sizes = rng.choice(rng.integers(50, largest, size=2), size=num_jobs)
    else:
        short, long = rng.integers(50, 1500, num_jobs), rng.integers(50, largest, num_jobs)
        sizes = np.where(rng.random(num_jobs) < 0.5, short, long)
    if rng.random() < 0.03:
        sizes[int(rng.integers(num_jobs))] = largest + 1
    work = work_of(rng, sizes, len(machines))
    if rng.random() < 0.2 and sizes.max() <= largest_job(machines[1:]):
        work[0, sizes > np.median(sizes)] = np.inf  # they would fit, but may not run there
    return work, sizes, machines


def largest_job(machines):
    """Size of the largest job that some machine runs."""
    return max((math.inf if each.takes_larger else each.capacity for each in machines), default=0)


def work_of(rng, sizes, num_types):
    """A constant, a slope and a bend per type."""
    constant = float(rng.choice([0, 0, 30]))
    slope, bend = rng.uniform(0.02, 0.2, num_types), rng.uniform(0, 2e-5, num_types)
    return slope[:, None] * sizes + bend[:, None] * sizes.astype(float) ** 2 + constant
