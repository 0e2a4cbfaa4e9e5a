"""Hydraulis, Figure 12: the strategy of every step, and how even its ranks are."""

from collections import Counter

from cells import Cell, best_strategy, mean_s, short_name
from paper_hydraulis import HETEROGENEOUS, HOMOGENEOUS, even_times_s
from paper_page import Figure, Row
from plan_cells import proposed
from plots import NUM_COLOURS, Panel, picture

STEPS, SHOWN = 100, 5


def _cell(tokens: int) -> Cell:
    return Cell(model="llama-32b", num_devices=64, data="cc", tokens=tokens)


def chosen_strategies() -> Figure:
    """Figure 12a: seconds of 100 steps by the strategy that each has, and how often each is chosen."""
    cell = _cell(100_000)
    strategies = [cell.strategy(HOMOGENEOUS), *proposed(cell)]
    batches = cell.batches(STEPS)
    steps = [best_strategy(strategies, cell.priced(batch)) for batch in batches]
    counts = Counter(number for number, _ in steps)
    shown = [number for number, _ in counts.most_common(NUM_COLOURS - 1)]
    dots = {
        short_name(strategies[number]): [
            (step + 1, time_s) for step, (chosen, time_s) in enumerate(steps) if chosen == number
        ]
        for number in shown
    }
    rest = [(step + 1, time_s) for step, (chosen, time_s) in enumerate(steps) if chosen not in shown]
    if rest:
        dots["others"] = rest
    homogeneous_s = mean_s(strategies[0], cell, batches)
    svg = picture(
        "Hydraulis, Figure 12a: the strategy of each step, 32B on 64 A800s, CommonCrawl",
        Panel(title="100K tokens a step", x_title="step", y_title="seconds of the micro-batches", dots=dots),
        Panel(
            title="how often each is chosen", x_title="strategy, in the order above", y_title="steps",
            bars={name: [len(points) if k == n else None for k in range(len(dots))]
                  for n, (name, points) in enumerate(dots.items())},
            groups=[f"S{k + 1}" for k in range(len(dots))], stacked=True,
        ),
        columns=1,
    )  # fmt: skip
    rows = (
        Row(
            what=f"strategies chosen in {STEPS} steps", published="at least 4 (S0 to S3)", ours=f"{len(counts)}",
            why="candidates of our proposer for lengths like theirs",
        ),
        Row(
            what=f"seconds of {HOMOGENEOUS} over the chosen strategies, mean", published="figure only",
            ours=f"{homogeneous_s / (sum(time_s for _, time_s in steps) / STEPS):.2f}x",
            why="propagation alone, predicted; their dots are measured",
        ),
    )  # fmt: skip
    return Figure(svg=svg, rows=rows, text="Predicted under the published costs; candidates from our proposer.")


def balance() -> Figure:
    """Figure 12b: the slowest and the fastest pipeline of five steps."""
    cell = _cell(200_000)
    bars: dict[str, list[float | None]] = {
        f"{side}, {end}": [] for side in ("even packs", "planned") for end in ("slowest", "fastest")
    }
    gaps: dict[str, list[float]] = {"even packs": [], "planned": []}
    for batch in cell.batches(SHOWN):
        planned = cell.strategy(HETEROGENEOUS).assign(cell.priced(batch))[1].spans
        for side, times_s in (("even packs", even_times_s(cell, batch)), ("planned", list(planned))):
            bars[f"{side}, slowest"].append(max(times_s))
            bars[f"{side}, fastest"].append(min(times_s))
            gaps[side].append(1 - min(times_s) / max(times_s))
    svg = picture(
        "Hydraulis, Figure 12b: slowest and fastest rank of five steps, 32B on 64 A800s",
        Panel(
            title=f"even packs on {HOMOGENEOUS}, planned on {HETEROGENEOUS}", x_title="step",
            y_title="seconds of the micro-batches", bars=bars, groups=[str(k + 1) for k in range(SHOWN)],
        ),
        columns=1,
    )  # fmt: skip
    rows = tuple(
        Row(
            what=f"gap of slowest and fastest rank, {side}", published=published,
            ours=f"{min(gaps[side]):.2f} to {max(gaps[side]):.2f}", why=why,
        )
        for side, published, why in (
            ("even packs", "0.36 to 0.65", "five steps each; seven packs leave one of four pipelines half of the work"),
            ("planned", "0.02 to 0.10", "where one sequence of the step is the bottleneck, the others must wait"),
        )
    )  # fmt: skip
    text = (
        "200K tokens a step. Gaps are shares of the slowest rank; 30 steps are in the "
        "[published tables](../benchmarks/paper_tables.md#hydraulis-table-1-and-section-84)."
    )
    return Figure(svg=svg, rows=rows, text=text)
