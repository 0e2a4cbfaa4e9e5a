"""Hydraulis, Figures 5 and 15: what packs of one length hold, and how their time differs."""

import numpy as np
from cells import Cell
from hydraulis_cost import TABLES
from hydraulis_lengths import histogram
from paper_page import Figure, Row
from plots import Panel, picture

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.uniform.static import static

EDGES = (0, 1024, 2048, 4096, 16_384, 32_769)
STEPS, PACKS = 60, 4
"""Steps that are drawn, and packs that make a step count (appendix A.2)."""
SETTINGS = {"PP 4, TP 2": (2, 4), "DP 2, TP 4": (4, 1)}


def pack_contents() -> Figure:
    """Figure 5: sequences by length in every micro-batch of one step, and what attention costs there."""
    cell = Cell(model="llama-13b", num_devices=16, data="cc", tokens=200_000)
    candidate = cell.candidate((8, 1))
    batch = next(batch for batch in cell.batches(STEPS) if max(batch.lengths) == cell.context)
    (pipelines,) = static(cell.problem, candidate).phases(cell.priced(batch))
    packs = [
        (f"DP{number} mb{k}", np.array([batch.lengths[i] for i in pack]))
        for number, pipeline in enumerate(pipelines)
        for k, pack in enumerate(pipeline.packs)
    ]
    counts = [histogram(lengths, EDGES) for _, lengths in packs]
    times_s = [float(candidate.times_s(lengths).sum()) + candidate.overhead_s for _, lengths in packs]
    groups = [name for name, _ in packs]
    svg = picture(
        "Hydraulis, Figure 5: sequences of each micro-batch, packs of 32K on 2 x <8,1>, 13B",
        Panel(
            title="200K tokens with a sequence of 32K, dealt in turn", x_title="micro-batch", y_title="sequences",
            bars={f"{name} tokens": [count[name] for count in counts] for name in counts[0]},
            groups=groups, stacked=True,
        ),
        Panel(title="predicted time", x_title="micro-batch", y_title="seconds", bars={"time": times_s}, groups=groups),
        columns=1,
    )  # fmt: skip
    full = [time_s for time_s, (_, lengths) in zip(times_s, packs) if lengths.sum() > 0.9 * cell.context]
    numbers = [len(lengths) for _, lengths in packs]
    rows = (
        Row(
            what="sequences of a micro-batch, fewest and most", published="figure only",
            ours=f"{min(numbers)} and {max(numbers)}", why="as there, packs of equal length hold different sequences",
        ),
        Row(
            what="slowest over fastest of the full micro-batches", published="figure only",
            ours=f"{max(full) / min(full):.2f}x", why="attention is squared in each sequence, packs are linear",
        ),
    )  # fmt: skip
    return Figure(svg=svg, rows=rows, text="Packs filled to 32K, first-fit decreasing, under the published costs.")


def fluctuation_of_time() -> Figure:
    """Figure 15: seconds of steps that all have 100K tokens in four packs, by what they are spent on."""
    cell = Cell(model="llama-7b", num_devices=8, data="cc", tokens=100_000)
    steps = [(batch, packs) for batch in cell.batches(3 * STEPS) if len(packs := _packs(batch, cell.context)) == PACKS]
    steps = steps[:STEPS]
    panels, rows = [], []
    for name, place in SETTINGS.items():
        candidate = cell.candidate(place)
        parts = np.array([_parts_s(candidate, batch, packs) for batch, packs in steps])
        total = parts.sum(axis=1)
        lines = {
            words: list(enumerate(values.tolist(), start=1))
            for words, values in (
                ("whole step", total), ("other computation and communication", parts[:, 1]), ("attention", parts[:, 0])
            )
        }  # fmt: skip
        panels.append(Panel(title=name, x_title="step", y_title="seconds of the micro-batches", lines=lines))
        low, high = np.quantile(total, [0.05, 0.95])
        rows.append(
            Row(
                what=f"fluctuation of the step time, {name}", published="about 20 %",
                ours=f"{(high - low) / np.median(total):.0%}",
                why="ours: 5th to 95th percentile over the median of as many steps; how theirs was read is not said",
            )
        )  # fmt: skip
    svg = picture("Hydraulis, Figure 15: seconds of steps of four packs each, 7B on 8 A800s", *panels)
    text = f"{len(steps)} steps of 100K tokens in {PACKS} first-fit-decreasing packs of 32K each; published costs."
    return Figure(svg=svg, rows=tuple(rows), text=text)


def _packs(batch: GlobalBatch, context: int) -> list[list[int]]:
    return first_fit_decreasing(list(batch.lengths), context)


def _parts_s(candidate: Candidate, batch: GlobalBatch, packs: list[list[int]]) -> tuple[float, float]:
    """Attention and everything else: of the slower of two groups of packs, or of four packs through the stages."""
    a_ms, b_ms, c_ms = TABLES["llama-7b"].fits_ms[candidate.scheme.degree, candidate.num_stages]
    squared, linear = (
        np.array([sum(float(batch.lengths[i]) ** power for i in pack) for pack in packs]) for power in (2, 1)
    )
    attention_s, other_s = a_ms * squared / 1e3, (b_ms * linear + c_ms) / 1e3
    if candidate.num_stages > 1:
        slowest = int(np.argmax(attention_s + other_s))
        more = candidate.num_stages - 1
        return float(attention_s.sum() + more * attention_s[slowest]), float(other_s.sum() + more * other_s[slowest])
    groups = [attention_s[k::2].sum() + other_s[k::2].sum() for k in range(2)]
    slower = int(np.argmax(groups))
    return float(attention_s[slower::2].sum()), float(other_s[slower::2].sum())
