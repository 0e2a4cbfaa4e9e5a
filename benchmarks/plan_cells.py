"""Time and certified gap of dispatch with packing, per strategy; and of choosing a strategy per step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from cells import Cell, best_homogeneous, mean_s, short_name
from clock import timed
from pages import Goal, Section, at_most, number

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.heterogeneous.propose import Proposal, propose
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates
from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup, PlacedStrategy
from lengthwise.plan.solve.shop import Objective, ShopSchedule
from lengthwise.plan.space.draft_plan import Phase

MOST_CANDIDATES = 8
TUNING_BATCHES = 3
FIXED = {
    ("llama-32b", 64): ("<16,1> + 6 x <8,1>", "<16,1> + 2 x <2,4> + 8 x <1,4>", "<16,1> + 12 x <4,1>"),
    ("llama-32b", 1024): ("<16,1> + 3 x <8,1> + 238 x <4,1> + 2 x <4,4>",),
}
"""Strategies of the published scripts and studies, beside those chosen for the corpus."""
LIMITS_S = {64: 0.015, 1024: 0.075}
CHOICE_LIMITS_S = {64: 0.040, 1024: 0.300}
PER_MICRO_BATCH = "c per micro-batch"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on the batches of one cell."""

    cell: Cell
    role: str
    """``homogeneous``, ``proposed`` or ``fixed``."""
    strategy: str
    num_pipelines: int
    times_s: tuple[float, ...]
    gaps: tuple[float, ...]
    spans_s: tuple[float, ...]


def all_cells(objective: Objective, *, quick: bool) -> Iterator[Cell]:
    """Every model, size, corpus and reading of c."""
    for num_devices in (64, 1024):
        for model in ("llama-32b",) if quick else ("llama-7b", "llama-32b"):
            for data in ("cc", "gh"):
                for per_sequence in (False,) if quick else (False, True):
                    yield Cell(
                        model=model,
                        num_devices=num_devices,
                        data=data,
                        per_sequence=per_sequence,
                        objective=objective,
                    )


def strategies(cell: Cell) -> list[tuple[str, PlacedStrategy]]:
    """The best homogeneous strategy, the best proposed ones and fixed ones, with their roles."""
    batches = cell.batches(TUNING_BATCHES)
    found = [("homogeneous", best_homogeneous(cell, batches))]
    mixed = [each for each in proposed(cell) if len(each.tiles) > 1]
    found += [("proposed", each) for each in sorted(mixed, key=lambda each: mean_s(each, cell, batches))[:2]]
    if cell.data == "cc":
        found += [("fixed", cell.strategy(words)) for words in FIXED.get((cell.model, cell.num_devices), ())]
    return found


def proposed(cell: Cell) -> list[PlacedStrategy]:
    """What our proposer says for the corpus, under the flow shop whatever the objective."""
    found, _ = proposals(replace(cell, objective=Objective.FLOW_SHOP))
    return [
        PlacedStrategy(
            cell.problem, [PipelineGroup(candidate=candidate, count=count) for candidate, count in each.counts]
        )
        for each in found
    ]


@cache
def proposals(cell: Cell) -> tuple[list[Proposal], float]:
    """Proposals for a cell and the seconds they took."""
    return timed(propose, cell.problem, list(cell.problem.candidates), max_strategies=MOST_CANDIDATES)


def measure(cell: Cell, role: str, strategy: PlacedStrategy, batches: list[GlobalBatch]) -> Row:
    """Plan every batch that fits, from lengths to pipelines with packs and a bound."""
    fitting = [batch for batch in batches if max(batch.lengths) <= strategy.max_length]
    times_s, gaps, spans_s = [], [], []
    for batch in fitting:
        (_, found), time_s = timed(_assign, strategy, cell, batch)
        times_s.append(time_s)
        gaps.append(found.makespan / found.lower_bound - 1)
        spans_s.append(found.makespan)
    return Row(
        cell=cell,
        role=role,
        strategy=short_name(strategy),
        num_pipelines=strategy.num_pipelines,
        times_s=tuple(times_s),
        gaps=tuple(gaps),
        spans_s=tuple(spans_s),
    )


def _assign(strategy: PlacedStrategy, cell: Cell, batch: GlobalBatch) -> tuple[Phase, ShopSchedule]:
    return strategy.assign(cell.priced(batch))


def time_and_gap(objective: Objective, *, quick: bool) -> Section:
    """Every strategy of every cell under one objective."""
    rows = []
    for cell in all_cells(objective, quick=quick):
        batches = cell.batches(3 if quick else 12)
        for role, strategy in strategies(cell):
            strategy.assign(cell.priced(batches[0]))  # what is computed once per strategy is not planning of a step
            rows.append(measure(cell, role, strategy, batches))
    flow_shop = objective is Objective.FLOW_SHOP
    return Section(
        title=f"Time and certified gap, {'flow shop' if flow_shop else 'Eq. (1)'}",
        text="Dispatch, packing of all pipelines and proven bound of one step under one strategy: from a list of "
        "lengths to packs. The gap is the plan over the bound, so it holds the looseness of the bound.",
        head=("setting", "strategy", "role", "pipelines", "steps", "median", "90 %", "gap mean", "median", "worst"),
        rows=[_cells(row) for row in rows],
        goals=tuple(_goals(rows)) if flow_shop else tuple(_eq1_goals(rows)),
        after=_slowest(rows),
    )


def _slowest(rows: list[Row]) -> str:
    medians_s = {
        size: max(
            (float(np.median(row.times_s)), row.strategy)
            for row in rows
            if row.cell.num_devices == size and row.times_s
        )
        for size in LIMITS_S
    }
    words = [f"{number(time_s, 'ms')} on {size:,} GPUs ({name})" for size, (time_s, name) in medians_s.items()]
    return f"Median of the slowest row: {', '.join(words)}."


def _cells(row: Row) -> tuple[str | int, ...]:
    times_s, gaps = np.array(row.times_s), np.array(row.gaps)
    if not len(gaps):
        return row.cell.name, row.strategy, row.role, row.num_pipelines, 0, "-", "-", "-", "-", "-"
    return (
        row.cell.name,
        row.strategy,
        row.role,
        row.num_pipelines,
        len(gaps),
        number(float(np.median(times_s)), "ms"),
        number(float(np.quantile(times_s, 0.9)), "ms"),
        number(float(gaps.mean()), "%"),
        number(float(np.median(gaps)), "%"),
        number(float(gaps.max()), "%"),
    )


def _goals(rows: list[Row]) -> Iterator[Goal]:
    for num_devices, limit_s in LIMITS_S.items():
        held = [row for row in rows if row.cell.num_devices == num_devices]
        tokens = "200K" if num_devices == 64 else "3.2M"
        what = f"dispatch, packing and certificate, {num_devices:,} GPUs, {tokens} tokens, one core"
        yield at_most(
            f"{what}: median over all plans", _median([t for row in held for t in row.times_s]), limit_s, "ms"
        )
    cc = [row for row in rows if row.cell.data == "cc"]
    homogeneous = [row for row in cc if row.role == "homogeneous"]
    per_sequence = [gap for row in homogeneous if row.cell.per_sequence for gap in row.gaps]
    per_micro_batch = [gap for row in homogeneous if not row.cell.per_sequence for gap in row.gaps]
    yield at_most("mean gap, cc, homogeneous, c per sequence", _mean(per_sequence), 0.001, "%")
    yield at_most("mean gap, cc, homogeneous, c per micro-batch", _mean(per_micro_batch), 0.025, "%")
    for data, roles, mean_limit in (("cc", ("proposed",), 0.03), ("gh", ("proposed", "homogeneous"), 0.08)):
        gaps = [gap for row in rows if row.cell.data == data and row.role in roles for gap in row.gaps]
        what = f"{data}, {' and '.join(roles)} strategies"
        yield at_most(f"median gap, {what}", _median(gaps), 0.01, "%")
        yield at_most(f"mean gap, {what}", _mean(gaps), mean_limit, "%")


def _eq1_goals(rows: list[Row]) -> Iterator[Goal]:
    for data in ("cc", "gh"):
        gaps = [gap for row in rows if row.cell.data == data and row.role != "fixed" for gap in row.gaps]
        yield at_most(f"median gap, {data}, Eq. (1), proposed and homogeneous strategies", _median(gaps), 0.01, "%")
        yield at_most(f"mean gap, {data}, Eq. (1), proposed and homogeneous strategies", _mean(gaps), 0.08, "%")


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def choice(*, quick: bool) -> Section:
    """The best of at most eight candidates, per step."""
    rows, goals = [], []
    medians: dict[int, list[float]] = {64: [], 1024: []}
    for cell in all_cells(Objective.FLOW_SHOP, quick=quick):
        candidates = StrategyCandidates(proposed(cell)[:MOST_CANDIDATES])
        times_s, gaps, over = [], [], []
        static = best_homogeneous(cell, cell.batches(TUNING_BATCHES))
        batches = cell.batches(3 if quick else 12)
        for number_, batch in enumerate([batches[0], *batches]):
            (best_s, bound_s), time_s = timed(_choose, cell, candidates, batch)
            if number_ == 0:
                continue  # what is computed once per strategy
            times_s.append(time_s)
            gaps.append(best_s / bound_s - 1)
            priced = cell.priced(batch)
            over.append((static.assign(priced)[1].makespan + static.update_s) / best_s)
        medians[cell.num_devices].append(float(np.median(times_s)))
        rows.append(
            (
                cell.name,
                len(candidates.strategies),
                number(float(np.median(times_s)), "ms"),
                number(max(times_s), "ms"),
                number(float(np.median(gaps)), "%"),
                number(float(np.mean(gaps)), "%"),
                number(float(np.mean(over)), "x"),
            )
        )
    for num_devices, limit_s in CHOICE_LIMITS_S.items():
        what = f"choosing among at most {MOST_CANDIDATES} candidates and planning, {num_devices:,} GPUs"
        goals.append(at_most(f"{what}: median over cells", _median(medians[num_devices]), limit_s, "ms"))
    return Section(
        title="Choosing a strategy per step",
        text="Bounds of all candidates first, then plans in their order while one can still win. The gap is to the "
        "least bound of all candidates, so it certifies the choice too. Last column: time of the best homogeneous "
        "strategy over ours.",
        head=("setting", "candidates", "median", "worst", "gap median", "mean", "best homogeneous takes"),
        rows=rows,
        goals=tuple(goals),
    )


def _choose(cell: Cell, candidates: StrategyCandidates, batch: GlobalBatch) -> tuple[float, float]:
    priced = cell.priced(batch)
    bounds_s = candidates.bounds_s(priced)
    return candidates.best(priced, bounds_s)[1], min(bounds_s)
