"""Hydraulis, Figure 11: seconds of a step by GPUs, longest sequence and tokens a step."""

from dataclasses import replace
from statistics import fmean

from as_published import padded_packs_s, slow_switching_s
from cells import Cell
from paper_page import Figure, Row
from plots import Panel, picture

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.planner import Planner
from lengthwise.plan.uniform import hotspa, static

STEPS = 10
START = Cell(model="llama-7b", num_devices=16, data="cc", tokens=200_000)
FACTORS = {
    "GPUs": [replace(START, num_devices=count) for count in (8, 16, 32, 64)],
    "longest sequence (K tokens)": [replace(START, context=length) for length in (4096, 8192, 16_384, 32_768)],
    "tokens a step (K)": [replace(START, tokens=tokens) for tokens in (50_000, 100_000, 200_000, 400_000)],
}
SYSTEMS = ("Megatron-LM, padded", "Megatron-LM", "HotSPa, 2 s switches", "hydraulis")


def scaling() -> Figure:
    """Three panels, one factor each, from the default of 16 GPUs, 32K and 200K tokens."""
    panels, rows = [], []
    for factor, cells in FACTORS.items():
        places = [_place(factor, cell) for cell in cells]
        times_s = [_times_s(cell, cell.batches(STEPS)) for cell in cells]
        lines = {name: [(place, each[name]) for place, each in zip(places, times_s)] for name in SYSTEMS}
        panels.append(Panel(title=f"by {factor}", x_title=factor, y_title="seconds of a step", lines=lines, dots=lines))
        for name in SYSTEMS:
            rows.append(
                Row(
                    what=f"{name}, {factor} {places[0]:g} to {places[-1]:g}", published=SAID[factor].get(name, ""),
                    ours=f"{times_s[-1][name] / times_s[0][name]:.2f}x the seconds",
                    why=WHY[factor],
                )
            )  # fmt: skip
    svg = picture("Hydraulis, Figure 11: scaling of LLaMA 7B, CommonCrawl", *panels)
    text = (
        f"{STEPS} simulated steps from 16 A800s, 32K and 200K tokens, one factor changed at a time. Its corpus has "
        "sequences to 128K there, ours ends at 32K; DeepSpeed is left out, since no costs of it were published."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


SAID = {
    "GPUs": dict.fromkeys(SYSTEMS, "sub-linear"),
    "longest sequence (K tokens)": {
        "Megatron-LM": "a large increase", "HotSPa, 2 s switches": "less sensitive", "hydraulis": "less sensitive",
    },
    "tokens a step (K)": {
        "Megatron-LM": "almost linear", "HotSPa, 2 s switches": "slightly below", "hydraulis": "slightly below",
    },
}  # fmt: skip
"""What its text says of each line."""
WHY = {
    "GPUs": "predicted by the published fits; sums of gradients are closed forms",
    "longest sequence (K tokens)": "longer sequences need wider pipelines, which short ones pay for in the baselines",
    "tokens a step (K)": "a small step leaves devices of the baselines idle, so that they begin higher and grow less",
}


def _place(factor: str, cell: Cell) -> float:
    return {"GPUs": cell.num_devices, "tokens a step (K)": cell.tokens / 1000}.get(factor, cell.context / 1024)


def _times_s(cell: Cell, batches: list[GlobalBatch]) -> dict[str, float]:
    """Mean seconds of a step of each system, tuned on other steps."""
    problem = cell.problem
    megatron, switching = static.prepare(problem), hotspa.prepare(problem)
    planner = Planner(policy="hydraulis", problem=problem)
    static_planner = Planner(policy="static", problem=problem)
    return {
        "Megatron-LM, padded": padded_packs_s(problem, megatron.candidate, batches),
        "Megatron-LM": fmean(static_planner(batch).time_s for batch in batches),
        "HotSPa, 2 s switches": fmean(slow_switching_s(switching, cell.priced(batch)) for batch in batches),
        "hydraulis": fmean(planner(batch).time_s for batch in batches),
    }
