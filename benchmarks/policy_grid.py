"""`auto` beside every other policy on a grid of lengths x models x clusters x step sizes, simulated.

    python benchmarks/policy_grid.py [--cells N] [--steps N] [--minutes M]

Runs what ``lengthwise compare`` runs, on N cells of the grid in a shuffled order, none begun after M minutes, and
writes policy_grid.md and results/policy_grid.json: how much faster `auto` is than tuned `static` and than the best
other policy, and in how many cells any policy is faster than `auto` in what users see.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from math import exp, log
from time import perf_counter

import numpy as np
from pages import Goal, Section, on_one_core, say, write

import lengthwise
from lengthwise.core.errors import InfeasibleError
from lengthwise.report.pages.compare_results import ClusterResult

CAP = 16_384
NAMED = ("commoncrawl", "githubcode", "dcp-short")
MADE = ("rollouts", "equal", "two-humped", "giant")
"""Lengths of reinforcement learning with a fifth at the cap, all equal, of two kinds, and with one giant among them."""
MODELS = ("llama-7b", "llama-13b", "llama-32b", "llama-66b", "transformer-1d-5b")
CLUSTERS = ("8xH100-80GB", "64xH100-80GB", "256xA800-80GB")
TOKENS = (200_000, 1_000_000)
ROUNDING = 1e-9
"""Relative: tokens per second are compared to nine digits."""

Cell = tuple[str, str, str, int]


def main() -> None:
    """Play the cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=30, help="how many of the grid")
    parser.add_argument("--steps", type=int, default=3, help="global batches of each")
    parser.add_argument("--minutes", type=float, default=60, help="after which no cell is begun")
    options = parser.parse_args()
    on_one_core()
    grid = list(product((*NAMED, *MADE), MODELS, CLUSTERS, TOKENS))
    order = np.random.default_rng(0).permutation(len(grid)).tolist()
    first = ("rollouts", "llama-66b", "256xA800-80GB", 200_000)
    cells = [first, *(grid[number] for number in order if grid[number] != first)][: options.cells]
    results, start_s = [], perf_counter()
    for cell in cells:
        if perf_counter() - start_s < options.minutes * 60:
            results.append((cell, play(cell, options.steps)))
    first_words = (
        f"**Simulated**: {len(results)} of the {len(grid)} cells of a grid of {len(NAMED) + len(MADE)} kinds of "
        f"lengths, {len(MODELS)} models, {len(CLUSTERS)} clusters and {len(TOKENS)} sizes of step, drawn at random but "
        f"for the first; {options.steps} steps each, all ten policies with the default search space, "
        "costs from data sheets."
    )
    write(
        "policy_grid",
        title="Policies on a grid",
        first=first_words,
        sections=[say(summed(results)), say(rows(results))],
    )


def play(cell: Cell, steps: int) -> ClusterResult | None:
    """Every policy on one cell; None where none can run."""
    name, model, cluster, tokens = cell
    lengths = name if name in NAMED else made(name)
    start_s = perf_counter()
    try:
        result = lengthwise.compare(lengths, model=model, cluster=cluster, tokens_per_step=tokens, steps=steps)
    except InfeasibleError as error:
        sys.stdout.write(f"{cell}: {str(error)[:100]}\n")
        return None
    (played,) = result.clusters
    lead = ", ".join(f"{one.policy} {one.tokens_per_s:,.0f}" for one in played.ranked[:3])
    sys.stdout.write(f"{'LOST ' if is_lost(played) else ''}{cell}: {lead} ({perf_counter() - start_s:.0f} s)\n")
    sys.stdout.flush()
    return played


def made(name: str) -> np.ndarray:
    """Tokens of sequences of one of ``MADE``."""
    rng = np.random.default_rng(0)
    rollouts = np.minimum(rng.lognormal(7.5, 1.0, 20_000), CAP)
    rollouts[: len(rollouts) // 5] = CAP
    lengths = {
        "rollouts": rollouts,
        "equal": np.full(20_000, 4096),
        "two-humped": np.concatenate([rng.normal(500, 50, 18_000), rng.normal(14_000, 500, 2_000)]),
        "giant": np.append(rng.lognormal(6, 0.5, 20_000), 100_000),
    }
    return np.maximum(lengths[name], 2).astype(np.int32)


def is_lost(result: ClusterResult) -> bool:
    """Whether `auto` is refused, or another policy is faster."""
    best = result.ranked[0]
    ours = next((one for one in result.ranked if one.policy == "auto"), None)
    return ours is None or best.tokens_per_s > ours.tokens_per_s * (1 + ROUNDING)


def ratios(results: Sequence[tuple[Cell, ClusterResult | None]], other: str) -> list[float]:
    """Tokens per second of `auto` over those of ``other`` in every cell where both run."""
    found = []
    for _, result in results:
        speed = {one.policy: one.tokens_per_s for one in result.ranked} if result else {}
        best = max((value for name, value in speed.items() if name != "auto"), default=None)
        rival = best if other == "best other" else speed.get(other)
        if rival and "auto" in speed:
            found.append(speed["auto"] / rival)
    return found


def summed(results: Sequence[tuple[Cell, ClusterResult | None]]) -> Section:
    """Geometric means over the cells."""
    lines = []
    for name in ("padded", "static", "packed", "hotspa", "dcp-intra", "hydraulis", "best other"):
        found = ratios(results, name)
        if found:
            mean = exp(sum(map(log, found)) / len(found))
            lines.append((name, str(len(found)), f"{mean:.3f}x", f"{min(found):.4f}x", f"{max(found):.2f}x"))
    lost = [cell for cell, result in results if result and is_lost(result)]
    return Section(
        title="`auto` over others",
        text="Tokens per second, geometric mean over the cells where both can run. *Best other* is the fastest of the "
        "nine in each cell, chosen afterwards.",
        head=("over", "cells", "mean", "least", "most"),
        rows=lines,
        goals=(
            Goal(
                what="cells in which another policy is faster than `auto`",
                aim="0",
                measured=f"{len(lost)} of {sum(result is not None for _, result in results)}",
                met=not lost,
            ),
        ),
    )


def rows(results: Sequence[tuple[Cell, ClusterResult | None]]) -> Section:
    """One line a cell."""
    lines = []
    for (lengths, model, cluster, tokens), result in results:
        cell = (lengths, model, cluster, f"{tokens:,}")
        if result is None:
            lines.append((*cell, "refused", "", "", ""))
            continue
        ours = next(one for one in result.policies if one.policy == "auto")
        second = next((one for one in result.ranked if one.policy != "auto"), None)
        over, best = result.over_static(ours), result.over_best_other(ours)
        lines.append(
            (
                *cell,
                f"{ours.tokens_per_s:,.0f}",
                f"{over:.2f}x" if over else "",
                f"{best:.3f}x {second.policy}" if best and second else "",
                f"{ours.gap * 100:.1f} %",
            )
        )
    return Section(
        title="Cells",
        text="*Gap*: of `auto`'s time to a bound that no plan of the search space beats, median.",
        head=("lengths", "model", "cluster", "tokens a step", "tokens/s", "over static", "over the best other", "gap"),
        rows=lines,
    )


if __name__ == "__main__":
    main()
