"""Packing by others: integer programs by HiGHS (in SciPy) and CBC (through PuLP), and optima by CP-SAT."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from published import Solver
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, kron

from lengthwise.plan.solve.shop import Machines, Objective, ShopSchedule

WORKER = Path(__file__).with_name("cpsat.py")
"""CP-SAT runs in a process of its own: ortools and the HiGHS of other packages cannot be loaded into one."""


def highs(limit_s: float) -> Solver:
    """HiGHS with a time limit; after it, the best that was found."""

    def solve(work: np.ndarray, sizes: np.ndarray, capacity: int, count: int) -> list[int] | None:
        jobs = len(work)
        once = hstack([kron(eye_array(jobs), np.ones((1, count))), csr_array((jobs, 1))])
        held = hstack([kron(sizes[None, :].astype(float), eye_array(count)), csr_array((count, 1))])
        loads = hstack([kron(work[None, :], eye_array(count)), np.full((count, 1), -1.0)])
        found = milp(
            np.append(np.zeros(jobs * count), 1.0),
            constraints=[
                LinearConstraint(once, 1, 1),
                LinearConstraint(held, -np.inf, capacity),
                LinearConstraint(loads, -np.inf, 0),
            ],
            integrality=np.append(np.ones(jobs * count), 0),
            bounds=Bounds(0, np.append(np.ones(jobs * count), np.inf)),
            options={"time_limit": limit_s},
        )
        return None if found.x is None else found.x[:-1].reshape(jobs, count).argmax(axis=1).tolist()

    return solve


def cbc(pulp: ModuleType, limit_s: float) -> Solver:
    """CBC with a time limit, one thread: what the published code calls."""

    def solve(work: np.ndarray, sizes: np.ndarray, capacity: int, count: int) -> list[int] | None:
        jobs, bins = range(len(work)), range(count)
        program = pulp.LpProblem("pack", pulp.LpMinimize)
        longest = pulp.LpVariable("longest", lowBound=0)
        held = [[pulp.LpVariable(f"x_{job}_{number}", cat="Binary") for number in bins] for job in jobs]
        program += longest
        for job in jobs:
            program += pulp.lpSum(held[job]) == 1
        for number in bins:
            program += pulp.lpSum(int(sizes[job]) * held[job][number] for job in jobs) <= capacity
            program += pulp.lpSum(float(work[job]) * held[job][number] for job in jobs) <= longest
        program.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=limit_s, threads=1))
        if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        return [max(bins, key=lambda number: row[number].varValue or 0.0) for row in held]

    return solve


@dataclass(frozen=True, kw_only=True)
class Packing:
    """One pipeline to be packed, and a packing to start from."""

    work: list[float]
    sizes: list[int]
    capacity: int
    setup: float
    stages: int
    fewest: int
    most: int
    """Numbers of batches that may be tried."""
    flow_shop: bool
    span: float
    batches: list[list[int]]

    @classmethod
    def of(
        cls, work: np.ndarray, sizes: np.ndarray, machines: Machines, objective: Objective, found: ShopSchedule
    ) -> "Packing":
        """The problem of which ``found`` is a solution, on one machine."""
        tokens, batches = int(sizes.sum()), found.batches[0]
        fewest = max(1, -(-tokens // machines.capacity))
        return cls(
            work=work.tolist(),
            sizes=sizes.tolist(),
            capacity=machines.capacity,
            setup=machines.setup,
            stages=machines.stages,
            fewest=fewest,
            most=max(fewest, min(len(work), tokens // machines.min_fill), len(batches)),
            flow_shop=objective is Objective.FLOW_SHOP,
            span=found.makespan,
            batches=[list(batch) for batch in batches],
        )


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """What CP-SAT found."""

    span: float
    bound: float
    """Equal to ``span``, up to rounding, where ``is_proven``."""
    is_proven: bool


def optima(packings: Sequence[Packing], *, peers: Path, limit_s: float) -> list[Optimum]:
    """The best packings that CP-SAT finds, each within a time limit.

    Raises:
        RuntimeError: ortools is not there or does not run.
    """
    task = {"packings": [asdict(packing) for packing in packings], "peers": str(peers), "limit_s": limit_s}
    ran = subprocess.run([sys.executable, str(WORKER)], input=json.dumps(task), capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"exit {ran.returncode}")
    return [Optimum(**answer) for answer in json.loads(ran.stdout)]
