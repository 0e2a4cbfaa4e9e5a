"""What is scheduled: jobs with a size and a work per type of machine, machines that run batches, the span of a machine.

K types of machine, B jobs. A machine splits its jobs into batches; a batch takes setup + the work of its jobs and holds
jobs of at most `capacity` total size. Inside, jobs are positions in the order of decreasing size: 0 is the largest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

ROUNDING = 1e-12
"""Relative slack of comparisons between sums of floats, always on the side that keeps a bound valid."""


class Objective(StrEnum):
    """When a machine with `stages` stages ends its batches; t is the time of a batch, its work plus the setup."""

    FLOW_SHOP = "flow-shop"
    """sum(t) + (stages - 1) max(t): batches in order of their time through a line of equal stages."""
    MAX_TIMES_COUNT = "max-times-count"
    """(stages - 1 + count) max(t): every batch as long as the longest (Hydraulis Eq. 1)."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """`count` identical machines."""

    count: int
    stages: float = 1
    """Whole for a schedule; a bound may count fewer."""
    setup: float = 0.0
    """Time added to every batch."""
    capacity: int
    """Most total size of one batch."""
    min_fill: int = 1
    """Mean size of a batch below which more batches are not tried, unless the capacity forces them."""
    takes_larger: bool = False
    """Whether a job larger than the capacity may run, in a batch of its own."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.stages < 1 or self.capacity < 1 or self.min_fill < 1:
            raise ValueError(f"count, stages, capacity and min_fill must be at least 1: {self}")
        if not 0 <= self.setup < math.inf:
            raise ValueError(f"setup must be finite and not negative: {self}")


@dataclass(frozen=True, kw_only=True)
class ShopSchedule:
    """Which machine runs which jobs in which batch, when each machine ends and when it could have ended at best."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Per machine, types in order and `count` of each: its batches by decreasing work, each its jobs, largest first."""
    spans: tuple[float, ...]
    """Per machine: when it ends, 0 if it is idle."""
    makespan: float
    lower_bound: float
    """Proven: no dispatch and packing ends earlier. 0 < lower_bound <= makespan."""


@dataclass(frozen=True, kw_only=True)
class SearchEffort:
    """Budgets of the search, in iterations, so that equal inputs give equal schedules on any computer."""

    tolerance: float = 5e-4
    """Relative gap to the lower bound at which the search is content."""
    fills: int = 3
    """Deadlines for which machines are filled."""
    refills: int = 1
    """Times that machines are filled again, knowing by how much each type packs worse than estimated."""
    filled_jobs: int = 8000
    """Jobs times deadlines, beyond which only two deadlines are tried."""
    exchanged_jobs: int = 2000
    """Jobs on the machines whose spans are estimated while moving and swapping, per dispatch."""
    packed_jobs: int = 600
    """Jobs on the machines that are packed while moving and swapping, per dispatch; all jobs once if that is more."""
    swaps: int = 20
    """Moves and swaps between the batches of one machine, per number of batches."""
    exact_jobs: int = 8
    """Most jobs for which all schedules are searched, of all machines or of two."""
    exact_pairs: int = 12
    """Pairs of machines for which they are,"""
    paired_jobs: int = 16
    """in problems of at most so many jobs: of more, single moves and swaps leave little."""


@dataclass(frozen=True, kw_only=True)
class ShopProblem:
    """Checked inputs in the order of decreasing size."""

    work: np.ndarray
    """float64 [K, B]; inf where a job may not run."""
    sizes: np.ndarray
    """int64 [B]"""
    counts: np.ndarray
    """float64 [B]: identical jobs behind each column."""
    order: np.ndarray
    """int64 [B]: the caller's index of each column."""
    machines: tuple[Machines, ...]
    objective: Objective

    @cached_property
    def num_machines(self) -> int:
        """Machines of all types."""
        return sum(machines.count for machines in self.machines)

    @cached_property
    def kinds(self) -> list[int]:
        """Type of each machine."""
        return [kind for kind, machines in enumerate(self.machines) for _ in range(machines.count)]

    @cached_property
    def estimators(self) -> list["Estimate"]:
        """Per type, the span of a machine if its batches could be balanced."""
        return [estimator(machines, self.objective) for machines in self.machines]

    @cached_property
    def count(self) -> np.ndarray:
        """float64 [K]: machines of each type."""
        return np.array([machines.count for machines in self.machines], dtype=np.float64)

    @cached_property
    def later(self) -> np.ndarray:
        """float64 [K, 1]: stages after the first."""
        return np.array([[machines.stages - 1] for machines in self.machines], dtype=np.float64)

    @cached_property
    def setup(self) -> np.ndarray:
        """float64 [K, 1]"""
        return np.array([[machines.setup] for machines in self.machines], dtype=np.float64)

    @cached_property
    def capacity(self) -> np.ndarray:
        """float64 [K, 1]"""
        return np.array([[machines.capacity] for machines in self.machines], dtype=np.float64)

    @cached_property
    def taken(self) -> np.ndarray:
        """[K, B] what each job takes of a batch's capacity: its size, all of the capacity if it is larger."""
        return np.minimum(self.sizes, self.capacity).astype(self.sizes.dtype)

    @cached_property
    def density(self) -> np.ndarray:
        """float64 [K, 1]: least work per size of any job that may run there; 1 if none may."""
        least = np.where(np.isfinite(self.work), self.work / self.taken, np.inf).min(axis=1, keepdims=True)
        return np.where(np.isfinite(least), least, 1.0)

    @cached_property
    def has_setup(self) -> bool:
        """Whether batches of any type take a setup."""
        return bool(self.setup.any())

    @cached_property
    def has_whole_setups(self) -> bool:
        """Whether those of a type of one stage do."""
        return bool((self.setup * (self.later == 0)).any())

    @cached_property
    def alone(self) -> np.ndarray:
        """[K, B] time of a batch of one job; inf where it may not run."""
        return self.work + self.setup

    @cached_property
    def later_work(self) -> np.ndarray:
        """[K, B] work of each job on the stages after the first; 0 where it may not run."""
        return self.later * np.where(np.isfinite(self.work), self.work, 0.0)

    @cached_property
    def later_alone(self) -> np.ndarray:
        """[K, B] time on the stages after the first of a batch of one job; that of the setup where it may not run."""
        return self.later * (np.where(np.isfinite(self.work), self.work, 0.0) + self.setup)

    @cached_property
    def forced(self) -> np.ndarray:
        """[K, B] share of a setup that each job's size forces."""
        return self.setup * (self.taken / self.capacity)

    @cached_property
    def work_rows(self) -> list[list[float]]:
        """`work` as lists, which scalar code reads faster."""
        rows: list[list[float]] = self.work.tolist()
        return rows

    @cached_property
    def taken_rows(self) -> list[list[int]]:
        """`taken` as lists."""
        rows: list[list[int]] = self.taken.tolist()
        return rows


def make_problem(
    work: np.ndarray,
    sizes: np.ndarray,
    machines: Sequence[Machines],
    *,
    objective: Objective,
) -> ShopProblem:
    """Sort and check.

    Raises:
        ValueError: shapes do not match, work is negative or decreases with size, or a job fits on no machine.
    """
    work, sizes = np.asarray(work, dtype=np.float64), np.asarray(sizes, dtype=np.int64)
    if not machines or not len(sizes) or work.shape != (len(machines), len(sizes)):
        raise ValueError(
            f"work {work.shape} must be machine types x jobs: {len(machines)} x {len(sizes)}, both positive"
        )
    order = np.argsort(-sizes, kind="stable")
    work, sizes = work[:, order], sizes[order]
    limits = [np.inf if machine_type.takes_larger else machine_type.capacity for machine_type in machines]
    work[sizes > np.array(limits)[:, None]] = np.inf
    alone = ~np.isfinite(work).any(axis=0)
    if alone.any():
        job = int(alone.argmax())
        largest = max(machine_type.capacity for machine_type in machines)
        raise ValueError(
            f"job {order[job]} (size {sizes[job]}) can run on no machine; the largest capacity of a batch is {largest}"
        )
    if not (work > 0).all() or (work[:, 1:] > work[:, :-1]).any():
        raise ValueError("work must be positive and must not decrease with size")
    return ShopProblem(
        work=work, sizes=sizes, counts=np.ones(len(sizes)), order=order, machines=tuple(machines), objective=objective
    )


def span(times: Sequence[float], stages: float, objective: Objective) -> float:
    """When a machine ends whose batches take `times`, setup included; 0 without batches."""
    if not len(times):
        return 0.0
    if objective is Objective.FLOW_SHOP:
        return math.fsum(times) + (stages - 1) * max(times)
    return (stages - 1 + len(times)) * max(times)


def ideal_count(machines: Machines, objective: Objective, *, total: float, largest: float) -> int:
    """Number of batches from which on, in one direction or the other, the balanced span only grows; may be below 1.

    Fewer batches are longer until `total / largest` of them, which are as long as the largest job; setups cost more
    than balance gains from sqrt(later total / setup) of them. The best number is this or one more.
    """
    later = machines.stages - 1
    ratio = total / largest
    if objective is Objective.FLOW_SHOP:
        count = math.ceil(ratio - ROUNDING) - 1
    else:
        count = math.floor(ratio + ROUNDING)
    if machines.setup > 0 or later == 0:
        count = min(count, math.floor(math.sqrt(later * total / machines.setup)) if later else 0)
    return count


def balanced_span(machines: Machines, objective: Objective, *, total: float, largest: float, count: int) -> float:
    """Span with `count` batches of which the longest works `total / count`, or `largest` if that is more."""
    longest = max(total / count, largest)
    if objective is Objective.FLOW_SHOP:
        return total + count * machines.setup + (machines.stages - 1) * (longest + machines.setup)
    return (longest + machines.setup) * (machines.stages - 1 + count)


Estimate = Callable[[float, float, int], float]
"""Span from the total work, the largest work and the total size of the jobs of a machine, as if batches balanced."""


def estimator(machines: Machines, objective: Objective) -> Estimate:
    """How long a machine of this type takes if its batches could be balanced perfectly; never longer than it takes."""
    capacity, setup, later = machines.capacity, machines.setup, machines.stages - 1
    min_fill, flow = machines.min_fill, objective is Objective.FLOW_SHOP

    def one_stage(total: float, largest: float, size: int) -> float:
        return total + -(-size // capacity) * setup

    def stages(total: float, largest: float, size: int) -> float:
        if total <= 0.0:
            return 0.0
        fewest = -(-size // capacity)
        max_batches = size // min_fill
        ratio = total / largest  # from here to `best` as `ideal_count`, which is called less often
        count = math.ceil(ratio - ROUNDING) - 1 if flow else math.floor(ratio + ROUNDING)
        if setup > 0 or not later:
            count = min(count, math.floor(math.sqrt(later * total / setup)) if later else 0)
        best = math.inf
        for batches in (count, count + 1):
            if batches > max_batches:
                batches = max_batches
            if batches < fewest:
                batches = fewest
            longest = total / batches
            if longest < largest:
                longest = largest
            if flow:
                span = total + batches * setup + later * (longest + setup)
            else:
                span = (longest + setup) * (later + batches)
            if span < best:
                best = span
        return best

    return one_stage if flow and not later else stages
