"""Strategies for a corpus: how long proposing takes, and how good the proposals are on steps they have not seen."""

from statistics import fmean

import numpy as np
from cells import Cell, best_homogeneous, mean_step_s, published_candidates, short_name
from clock import timed
from pages import Goal, Section, at_most, number
from plan_cells import MOST_CANDIDATES, all_cells, proposals, proposed

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.heterogeneous.propose.closed_form import relax
from lengthwise.plan.heterogeneous.propose.parametric import integer_strategies
from lengthwise.plan.heterogeneous.propose.workload import make_workload
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates
from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup, PlacedStrategy
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.problem import PricedBatch

HELD_OUT = 16
TUNED_ON = 8
"""Of the samples that proposals see, those that one proposal is chosen by."""
REPEATS = 20
CLOSED_FORM_S = 1e-3
INTEGER_S = 2.0
PROPOSAL_S = {64: 10.0, 1024: 60.0}


def times(*, quick: bool) -> Section:
    """Eq. (4) in fractions and in whole pipelines, and the whole proposal."""
    rows: list[tuple[str | int, ...]] = []
    slowest: dict[str | int, float] = {}
    for cell in all_cells(Objective.FLOW_SHOP, quick=quick):
        if cell.per_sequence:
            continue
        problem, candidates = cell.problem, list(cell.problem.candidates)
        workload, table_s = timed(make_workload, problem, candidates, problem.samples)
        relax_s = min(timed(relax, workload)[1] for _ in range(REPEATS))
        limits, integer_s = timed(integer_strategies, workload)
        found, propose_s = proposals(cell)
        for name, time_s in (("relax", relax_s), ("integer", integer_s), (cell.num_devices, propose_s)):
            slowest[name] = max(slowest.get(name, 0.0), time_s)
        shown = [number(time_s, "ms") for time_s in (table_s, relax_s, integer_s)]
        rows.append((cell.name, *shown, len(limits), number(propose_s, "ms"), len(found)))
    return Section(
        title="Proposing strategies",
        text="Once per corpus, from 32 sampled steps. *Table*: steps and costs by class of length, which all others "
        "start from. *Fractions*: Eq. (4) with fractional pipelines, exactly. *Whole, with bubble*: the best whole "
        "pipelines for every longest length at once. *Proposal*: everything, with a local search on some samples and a "
        "check on the others.",
        head=("setting", "table", "fractions", "whole, with bubble", "lengths", "proposal", "strategies"),
        rows=rows,
        goals=(
            at_most("Eq. (4) in fractions, slowest setting", slowest["relax"], CLOSED_FORM_S, "ms"),
            at_most("Eq. (4), whole, with bubble, every length, slowest setting", slowest["integer"], INTEGER_S, "ms"),
            *(
                at_most(f"the whole proposal, {size:,} GPUs, slowest setting", slowest.get(size), limit_s, "ms")
                for size, limit_s in PROPOSAL_S.items()
            ),
        ),
        after="The paper's dynamic programme for Eq. (4) took 2.03 s on 64 GPUs and 107 s on 1,024.",
    )


def held_out(*, quick: bool) -> Section:
    """Planned latency on steps that no proposal saw, beside homogeneous strategies and Eq. (4)."""
    rows: list[tuple[str, ...]] = []
    above: list[float] = []
    step_above: list[float] = []
    gains: list[float] = []
    for cell in all_cells(Objective.FLOW_SHOP, quick=quick):
        tuned_on = _samples(cell)
        batches = cell.batches(4 if quick else HELD_OUT)
        static = best_homogeneous(cell, tuned_on)
        ours = proposed(cell)[:MOST_CANDIDATES]
        whole = [each for each in ours if each.max_length >= cell.context]
        single = min(whole, key=lambda strategy, cell=cell, seen=tuned_on: mean_step_s(strategy, cell, seen))
        printed, bubble = (eq4_strategy(cell, bubble=bubble) for bubble in (False, True))
        static_s, printed_s, bubble_s, single_s = (
            mean_step_s(each, cell, batches) for each in (static, printed, bubble, single)
        )
        step_s = fmean(_best_step_s(StrategyCandidates(ours), cell.priced(batch)) for batch in batches)
        least_s = min(static_s, printed_s, bubble_s)
        above.append(single_s / least_s - 1)
        step_above.append(step_s / least_s - 1)
        gains += [1 - single_s / min(static_s, printed_s)] if cell.model == "llama-7b" and cell.data == "cc" else []
        shown = [f"{time_s * 1e3:,.0f}" for time_s in (static_s, printed_s, bubble_s, single_s, step_s)]
        rows.append((cell.name, *shown, f"{least_s / step_s:.2f}x", short_name(static), short_name(single)))
    return Section(
        title="Proposals on steps they have not seen",
        text="Mean planned milliseconds of held-out steps, update included, flow shop. One fixed strategy per "
        "column, chosen on other steps of the same corpus; but *best per step*, which chooses among at most "
        f"{MOST_CANDIDATES} proposals. *Eq. (4)*: with whole pipelines as printed, which knows neither bubbles nor "
        "that one sequence cannot be split over pipelines; and with both. *Gain*: the best of these three over the "
        "best per step.",
        head=(
            "setting",
            "homogeneous",
            "Eq. (4)",
            "with bubble",
            "ours, one",
            "ours, best per step",
            "gain",
            "homogeneous",
            "ours, one",
        ),
        rows=rows,
        goals=_goals(above, step_above, gains),
    )


def _goals(above: list[float], step_above: list[float], gains: list[float]) -> tuple[Goal, ...]:
    rivals = "the best of homogeneous, Eq. (4) and Eq. (4) with bubble, held-out steps"
    what = "one proposal below the better of homogeneous and Eq. (4), held-out steps, 7B, cc, mean"
    mean = fmean(gains) if gains else None
    return (
        at_most(f"best proposal per step over {rivals}, worst setting", max(step_above), 0.0, "%"),
        at_most(f"one proposal over {rivals}, worst setting", max(above), 0.0, "%"),
        Goal(
            what=what,
            aim="at least 10 %",
            measured="-" if mean is None else number(mean, "%"),
            met=None if mean is None else mean >= 0.10,
        ),
    )


def _best_step_s(candidates: StrategyCandidates, priced: PricedBatch) -> float:
    return candidates.best(priced, candidates.bounds_s(priced))[1]


def _samples(cell: Cell) -> list[GlobalBatch]:
    """Some of the batches that proposals look at."""
    return [
        GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist()))
        for step, lengths in enumerate(cell.problem.samples[:TUNED_ON])
    ]


def eq4_strategy(cell: Cell, *, bubble: bool) -> PlacedStrategy:
    """Eq. (4) in whole pipelines for the longest length; leftover devices join as the largest that fit."""
    problem, candidates = cell.problem, published_candidates(cell.model, cell.num_devices)
    workload = make_workload(problem, list(candidates), [*problem.samples, np.array([problem.max_length])])
    counts = integer_strategies(workload, bubble=bubble)[0].counts.copy()
    devices = workload.devices
    while left := cell.num_devices - int(counts @ devices):
        fitting = np.flatnonzero((devices <= left) & (left % devices == 0))
        counts[fitting[np.argmax(devices[fitting])]] += 1
    tiles = [
        PipelineGroup(candidate=candidate, count=int(count))
        for candidate, count in zip(workload.candidates, counts)
        if count
    ]
    return PlacedStrategy(problem, sorted(tiles, key=lambda tile: -tile.max_length))
