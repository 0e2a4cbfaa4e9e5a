"""The published pipeline (Algorithm 1, then time-limited integer programs) beside ours, same strategy and objective."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import peers
from cells import Cell, Instance
from clock import timed
from exact import cbc, highs
from pages import Goal, Section, at_least, at_most, number
from published import Published, Solver, plan

from lengthwise.plan.solve.shop import Objective, ShopSchedule, schedule

HOMOGENEOUS, MIXED, STAGES = "4 x <16,1>", "<16,1> + 6 x <8,1>", "<16,1> + 2 x <2,4> + 8 x <1,4>"
SETTINGS = (
    (MIXED, True, 3),
    (STAGES, True, 2),
    (HOMOGENEOUS, True, 1),
    (MIXED, False, 1),
    (STAGES, False, 1),
)
"""Strategy, whether c is charged per sequence, steps."""
LIMIT_S = 0.5
"""Of each integer program: what the published code allows."""
QUICK_LIMIT_S = 0.05
WORSE = 0.001


def pipeline(folder: Path | None, *, quick: bool) -> Section:
    """Dispatch and packing as published, Eq. (1), against ours for the same objective."""
    solver, name = _solver(folder, limit_s=QUICK_LIMIT_S if quick else LIMIT_S)
    rows: list[tuple[str, ...]] = []
    ratios: dict[tuple[str, bool], list[float]] = {}
    for words, per_sequence, count in SETTINGS[:2] if quick else SETTINGS:
        cell = Cell(
            model="llama-32b",
            num_devices=64,
            data="cc",
            per_sequence=per_sequence,
            objective=Objective.MAX_TIMES_COUNT,
        )
        strategy = cell.strategy(words)
        instances = [Instance.of(strategy, cell.priced(batch)) for batch in cell.batches(1 if quick else count)]
        ours = [timed(schedule, each.work, each.sizes, each.machines, objective=cell.objective) for each in instances]
        theirs = [timed(plan, each, solver) for each in instances]
        ratio = [mine.makespan / other.makespan for (mine, _), (other, _) in zip(ours, theirs)]
        ratios[words, per_sequence] = ratio
        charged = "per sequence" if per_sequence else "per micro-batch"
        rows.append((words, charged, str(len(instances)), *_theirs(ours, theirs), *_ours(ours), _ratio(ratio)))
    return Section(
        title="The published pipeline, same strategy and objective",
        text="32B, 64 GPUs, 200K tokens, cc. Hydraulis' Algorithm 1 with 100 shuffles in the variant of its authors' "
        "code (our writing in NumPy, which is faster than theirs in Python), then Eq. (1) for every pipeline by "
        f"{name}: integer programs for at most 16 numbers of micro-batches, spread evenly, "
        f"{QUICK_LIMIT_S if quick else LIMIT_S} s each. Latency is Eq. (1) with the constant per sequence, as printed, "
        "or per micro-batch, as in the code; over the bound that ours proves.",
        head=("strategy", "constant", "steps", "published: time", "over bound", "ours: time", "over bound", "ratio"),
        rows=rows,
        goals=_goals(ratios),
    )


def _solver(folder: Path | None, *, limit_s: float) -> tuple[Solver, str]:
    try:
        return cbc(peers.package(folder, "pulp"), limit_s), f"CBC ({peers.version(folder, 'PuLP')})"
    except RuntimeError as error:
        return highs(limit_s), f"HiGHS (SciPy's; CBC not run: {error})"


def _theirs(ours: Sequence[tuple[ShopSchedule, float]], theirs: Sequence[tuple[Published, float]]) -> tuple[str, str]:
    late = fmean(other.makespan / mine.lower_bound - 1 for (mine, _), (other, _) in zip(ours, theirs))
    unsolved = sum(other.unsolved for other, _ in theirs)
    note = f" ({unsolved} pipelines unsolved in time)" if unsolved else ""
    return number(median(time_s for _, time_s in theirs), "ms"), f"+{number(late, '%')}{note}"


def _ours(ours: Sequence[tuple[ShopSchedule, float]]) -> tuple[str, str]:
    late = fmean(mine.makespan / mine.lower_bound - 1 for mine, _ in ours)
    return number(median(time_s for _, time_s in ours), "ms"), f"+{number(late, '%')}"


def _ratio(values: list[float]) -> str:
    return f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _goals(ratios: dict[tuple[str, bool], list[float]]) -> tuple[Goal, ...]:
    worst = max(value for values in ratios.values() for value in values)
    mixed, stages = (1 - fmean(ratios[words, True]) for words in (MIXED, STAGES))
    return (
        at_most("latency over the published pipeline's, worst of all steps", worst - 1, WORSE, "%"),
        at_least(f"better than the published pipeline on {MIXED}, mean", mixed, 0.04, "%"),
        at_least(f"better than the published pipeline on {STAGES}, mean", stages, 0.20, "%"),
    )
