"""Optimal packings by CP-SAT: reads a task from stdin, writes answers to stdout. Started by exact.py."""

import json
import os
import sys
from math import ceil
from time import perf_counter
from typing import Any

SCALE = 10_000_000
"""Integer units of the total work: rounding is far below any difference that is reported."""
WORKERS = 2


def main() -> None:
    task = json.load(sys.stdin)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # quality is asked for, not time on one core
    sys.path.append(task["peers"])
    from ortools.sat.python import cp_model

    json.dump([solve(cp_model, packing, task["limit_s"]) for packing in task["packings"]], sys.stdout)


def solve(cp_model: Any, packing: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Numbers of batches by their floors, each solved until none left can be better; spans in seconds."""
    work, total = packing["work"], sum(packing["work"])
    counts = range(packing["fewest"], packing["most"] + 1)
    floors = sorted((span_s(packing, max(total / count, max(work)), count), count) for count in counts)
    best_s, bound_s, end_s = packing["span"], float("inf"), perf_counter() + limit_s
    for floor_s, count in floors:
        if floor_s >= best_s * (1 - 1e-7):
            break
        left_s = end_s - perf_counter()
        if left_s <= 0:
            bound_s = min(bound_s, floor_s)
            break
        found, proven = longest_batch(cp_model, packing, count, left_s)
        if found is not None:
            best_s = min(best_s, span_s(packing, found, count))
        bound_s = min(bound_s, max(floor_s, span_s(packing, proven, count)))
    bound_s = min(bound_s, best_s)
    return {"span": best_s, "bound": bound_s, "is_proven": bound_s >= best_s * (1 - 1e-5)}


def span_s(packing: dict[str, Any], longest: float, count: int) -> float:
    """Span with ``count`` batches the longest of which works ``longest``."""
    if packing["flow_shop"]:
        setups = (count + packing["stages"] - 1) * packing["setup"]
        return sum(packing["work"]) + setups + (packing["stages"] - 1) * longest
    return (longest + packing["setup"]) * (packing["stages"] - 1 + count)


def longest_batch(cp_model: Any, packing: dict[str, Any], count: int, limit_s: float) -> tuple[float | None, float]:
    """The least work of the longest of ``count`` batches that was found, if any, and what it is at least."""
    total = sum(packing["work"])
    unit = total / SCALE
    order = sorted(range(len(packing["work"])), key=lambda job: -packing["work"][job])
    work = [round(packing["work"][job] / unit) for job in order]
    sizes = [packing["sizes"][job] for job in order]
    model = cp_model.CpModel()
    held = [[model.new_bool_var("") for _ in range(min(count, job + 1))] for job in range(len(order))]
    longest = model.new_int_var(max(max(work), ceil(sum(work) / count)), sum(work), "")
    for row in held:
        model.add_exactly_one(row)
    for number in range(count):
        mine = [job for job in range(len(order)) if number < len(held[job])]
        model.add(sum(sizes[job] * held[job][number] for job in mine) <= packing["capacity"])
        model.add(sum(work[job] * held[job][number] for job in mine) <= longest)
    model.minimize(longest)
    if len(packing["batches"]) == count:
        hint(model, packing, order, held)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, float("inf")
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return solver.objective_value * unit, solver.best_objective_bound * unit
    return None, solver.best_objective_bound * unit


def hint(model: Any, packing: dict[str, Any], order: list[int], held: list[list[Any]]) -> None:
    """Start from the packing that is known, its batches in the order of their largest jobs."""
    place = {job: at for at, job in enumerate(order)}
    batches = sorted((sorted(place[job] for job in batch) for batch in packing["batches"]), key=lambda batch: batch[0])
    for number, batch in enumerate(batches):
        for at in batch:
            for other, variable in enumerate(held[at]):
                model.add_hint(variable, other == number)


if __name__ == "__main__":
    main()
