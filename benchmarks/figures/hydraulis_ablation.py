"""Hydraulis, Figure 13: throughput as its parts are added one after another."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from as_published import padded_packs_s, padded_phase_s
from cells import Cell, best_strategy, mean_step_s
from paper_page import Figure, Row
from plan_cells import proposed
from plots import Panel, picture

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.heterogeneous.two_stage_assignment import PlacedStrategy
from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.space.draft_plan import Phase, PipelineDraft
from lengthwise.plan.space.problem import PricedBatch

HOMOGENEOUS = "4 x <16,1>"
"""What Megatron-LM runs there (Table 3)."""
PARTS = ("even packs", "a: dispatch", "b: packing", "c: heterogeneous", "d: dynamic")
STEPS = 30


def throughput() -> Figure:
    """Tokens per second of each part over the step before any of them."""
    bars, rows = {}, []
    for tokens in (100_000, 200_000):
        cell = Cell(model="llama-32b", num_devices=64, data="cc", tokens=tokens)
        times_s = _times_s(cell, cell.batches(STEPS))
        gains = [times_s[0] / time for time in times_s]
        bars[f"{tokens // 1000}K tokens a step"] = gains
        rows += [
            Row(
                what=f"{part}, {tokens // 1000}K tokens", published="figure only", ours=f"{gain:.2f}x",
                why=why,
            )
            for part, gain, why in zip(PARTS[1:], gains[1:], WHY)
        ]  # fmt: skip
    svg = picture(
        "Hydraulis, Figure 13: its parts added one after another, 32B on 64 A800s, CommonCrawl",
        Panel(
            title="throughput over packs of 32K dealt in turn", x_title="up to this part", y_title="speed-up (x)",
            bars=bars, groups=PARTS,
        ),
        columns=1,
    )  # fmt: skip
    text = (
        f"Means of {STEPS} simulated steps, update included, over fixed packs padded to 32K and dealt in turn to "
        f"{HOMOGENEOUS}: (a) dispatch by Eq. (3), packs still padded to 32K; (b) packing by Eq. (1); (c) the best "
        "fixed heterogeneous strategy that holds 32K; (d) the best strategy of each step. The text says that each "
        "part adds; by how much is in the figure alone."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


WHY = (
    "packs of one length are dealt out whole, so their number decides, the less the more there are",
    "packs hold what balances instead of padding",
    "as in the text, short sequences run on narrow pipelines",
    "as in the text, steps without long sequences need no wide pipeline",
)


def _times_s(cell: Cell, batches: list[GlobalBatch]) -> list[float]:
    """Mean seconds of a step with each part added."""
    homogeneous = cell.strategy(HOMOGENEOUS)
    candidates = proposed(cell)
    mixed = [each for each in candidates if each.max_length >= cell.context]
    fixed = min(mixed, key=lambda strategy: mean_step_s(strategy, cell, batches[:6]))
    return [
        padded_packs_s(cell.problem, cell.candidate((16, 1)), batches),
        _mean(cell, batches, lambda priced: padded_phase_s(priced, _packed_full(homogeneous, priced)))
        + homogeneous.update_s,
        mean_step_s(homogeneous, cell, batches),
        mean_step_s(fixed, cell, batches),
        _mean(cell, batches, lambda priced: _best_step_s([*candidates, homogeneous], priced)),
    ]


def _best_step_s(strategies: list[PlacedStrategy], priced: PricedBatch) -> float:
    best, span_s = best_strategy(strategies, priced)
    return span_s + strategies[best].update_s


def _mean(cell: Cell, batches: list[GlobalBatch], seconds: Callable[[PricedBatch], float]) -> float:
    return fmean(seconds(cell.priced(batch)) for batch in batches)


def _packed_full(strategy: PlacedStrategy, priced: PricedBatch) -> Phase:
    """Sequences dispatched as planned, and packed first-fit decreasing up to the context."""
    return tuple(_refilled(pipeline, priced) for pipeline in strategy.assign(priced)[0])


def _refilled(pipeline: PipelineDraft, priced: PricedBatch) -> PipelineDraft:
    mine = [position for pack in pipeline.packs for position in pack]
    lengths = [priced.batch.lengths[position] for position in mine]
    packs = first_fit_decreasing(lengths, min(priced.problem.max_length, pipeline.candidate.max_tokens))
    return replace(pipeline, packs=tuple(tuple(mine[k] for k in pack) for pack in packs))
