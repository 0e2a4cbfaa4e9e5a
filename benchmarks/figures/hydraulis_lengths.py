"""Hydraulis, Figures 3 and 14: how the longest sequence of a step comes and goes."""

import numpy as np
from cells import Cell
from paper_page import Figure, Row
from plots import Panel, picture

EDGES = (0, 512, 1024, 2048, 4096, 8192, 16_384, 32_769)
ITERATION = 20
"""The step whose lengths Figure 3 shows."""
SAMPLE = "our CommonCrawl-like lengths are drawn to match the published ranges, not the authors' sample"


def histogram(lengths: np.ndarray, edges: tuple[int, ...] = EDGES) -> dict[str, float]:
    """The sequences of each class of lengths, by its upper edge."""
    counts = np.histogram(lengths, edges)[0].astype(float).tolist()
    return {f"≤{edge / 1024:.2g}K": count for edge, count in zip(edges[1:], counts)}


def fluctuation() -> Figure:
    """Figure 3: the longest sequence of each step, and all sequences of one step."""
    cell = Cell(model="llama-32b", num_devices=64, data="cc", tokens=100_000)
    batches = cell.batches(100)
    longest = np.array([max(batch.lengths) for batch in batches])
    classes = histogram(np.array(batches[ITERATION - 1].lengths))
    names, counts = list(classes), list(classes.values())
    share = sum(counts[:2]) / sum(counts)
    svg = picture(
        "Hydraulis, Figure 3: longest sequences of steps, and lengths within a step",
        Panel(
            title="between steps: 100K tokens, 32K context", x_title="step", y_title="longest sequence (K tokens)",
            dots={"longest": [(step + 1, length / 1024) for step, length in enumerate(longest.tolist())]},
        ),
        Panel(
            title=f"within step {ITERATION}", x_title="length up to (tokens)", y_title="sequences",
            bars={"sequences": counts}, groups=names,
        ),
    )  # fmt: skip
    rows = (
        Row(
            what="longest sequence of 100 steps, from least to most", published="figure only",
            ours=f"{longest.min() / 1024:.1f}K to {longest.max() / 1024:.1f}K",
            why=f"{SAMPLE}; as there, it is often far below the context of 32K",
        ),
        Row(
            what=f"sequences of step {ITERATION} of at most 1K tokens", published="most",
            ours=f"{share:.0%} of {sum(counts):.0f}", why="the long tail is in both",
        ),
    )  # fmt: skip
    return Figure(svg=svg, rows=rows, text="Steps of 100K tokens as our sampler draws them from CommonCrawl-like data.")


def longest_of_large_steps() -> Figure:
    """Figure 14: steps sixteen times as large still differ in their longest sequence."""
    longest = {}
    for tokens in (100_000, 1_600_000):
        batches = Cell(model="llama-32b", num_devices=1024, data="cc", tokens=tokens).batches(30)
        longest[f"{tokens // 1000:,}K tokens a step"] = [
            (step + 1, max(batch.lengths) / 1024) for step, batch in enumerate(batches)
        ]
    large = [length for _, length in longest["1,600K tokens a step"]]
    svg = picture(
        "Hydraulis, Figure 14: the longest sequence of a step, by tokens a step",
        Panel(title="30 steps", x_title="step", y_title="longest sequence (K tokens)", lines=longest),
        columns=1,
    )
    rows = (
        Row(
            what="shortest of the longest sequences, 1.6M tokens a step", published=15.0, ours=min(large), unit="K",
            why="the tail of our lengths was chosen to match this range",
        ),
        Row(
            what="longest of them", published=32.0, ours=max(large), unit="K",
            why="the context length, where longer ones are cut",
        ),
    )  # fmt: skip
    return Figure(svg=svg, rows=rows, text="Thirty steps of 1.6M tokens, beside steps of 100K.")
