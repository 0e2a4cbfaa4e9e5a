"""`auto` beside every other policy on a grid of lengths x models x clusters x step sizes, simulated.

    python benchmarks/policy_grid.py [--cells N] [--steps N] [--minutes M]

Runs what ``lengthwise compare`` runs, on N cells of the grid in a shuffled order, none begun after M minutes, and
writes policy_grid.md and results/policy_grid.json: how much faster `auto` is than tuned `static` and than the best
other policy, and in how many cells any policy is faster than `auto` in what users see. Every cell is written to
results/policy_grid_cells.jsonl at once; those of the same commit and steps that are there are not run again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import exp, log
from time import perf_counter

import numpy as np
from measure import RESULTS
from pages import Goal, Section, on_one_core, provenance, say, write

import lengthwise
from lengthwise.core.errors import InfeasibleError

CAP = 16_384
NAMED = ("commoncrawl", "githubcode", "dcp-short")
MADE = ("rollouts", "equal", "two-humped", "giant")
"""Lengths of reinforcement learning with a fifth at the cap, all equal, of two kinds, and with one giant among them."""
MODELS = ("llama-7b", "llama-13b", "llama-32b", "llama-66b", "transformer-1d-5b")
CLUSTERS = ("8xH100-80GB", "64xH100-80GB", "256xA800-80GB")
TOKENS = (200_000, 1_000_000)
ROUNDING = 1e-9
"""Relative: tokens per second are compared to nine digits."""

PLAYED = RESULTS / "policy_grid_cells.jsonl"

Cell = tuple[str, str, str, int]
"""Lengths, model, cluster, tokens a step."""


@dataclass(frozen=True, kw_only=True)
class PlayedCell:
    """What the policies of one cell came to."""

    cell: Cell
    speeds: dict[str, float]
    """Tokens per second of each policy that can run; none where the longest sequence does not fit."""
    gap: float = 0.0
    """Of `auto`'s time to its bound, median."""

    @property
    def best_other(self) -> tuple[str, float] | None:
        """The fastest of the other policies and its tokens per second."""
        others = [(name, speed) for name, speed in self.speeds.items() if name != "auto"]
        return max(others, key=lambda entry: entry[1], default=None)

    @property
    def is_lost(self) -> bool:
        """Whether `auto` is refused, or another policy is faster."""
        best = self.best_other
        return best is not None and best[1] > self.speeds.get("auto", 0.0) * (1 + ROUNDING)

    def over(self, other: str) -> float | None:
        """Speed of `auto` over that of another policy, or of the best other; None unless both run."""
        best = self.best_other
        speed = best[1] if other == "best other" and best else self.speeds.get(other)
        return self.speeds["auto"] / speed if speed and "auto" in self.speeds else None


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
    run = {"commit": provenance()["commit"], "steps": options.steps}
    before, results, start_s = played_before(run), [], perf_counter()
    for cell in cells:
        if cell in before:
            results.append(before[cell])
        elif perf_counter() - start_s < options.minutes * 60:
            results.append(play(cell, options.steps))
            with PLAYED.open("a") as file:
                file.write(json.dumps({**run, **asdict(results[-1])}) + "\n")
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


def played_before(run: dict[str, object]) -> dict[Cell, PlayedCell]:
    """The cells that earlier runs of the same commit and steps have played."""
    cells = {}
    for line in PLAYED.read_text().splitlines() if PLAYED.exists() else ():
        entry = json.loads(line)
        if {name: entry.pop(name) for name in run} == run:
            cell: Cell = tuple(entry.pop("cell"))
            cells[cell] = PlayedCell(cell=cell, **entry)
    return cells


def play(cell: Cell, steps: int) -> PlayedCell:
    """Every policy on one cell."""
    name, model, cluster, tokens = cell
    lengths = name if name in NAMED else made(name)
    start_s = perf_counter()
    try:
        result = lengthwise.compare(lengths, model=model, cluster=cluster, tokens_per_step=tokens, steps=steps)
    except InfeasibleError as error:
        sys.stdout.write(f"{cell}: {str(error)[:100]}\n")
        return PlayedCell(cell=cell, speeds={})
    (cluster_result,) = result.clusters
    ranked = cluster_result.ranked
    gap = next((float(one.median_gap) for one in ranked if one.policy == "auto"), 0.0)
    played = PlayedCell(cell=cell, speeds={one.policy: float(one.tokens_per_s) for one in ranked}, gap=gap)
    lead = ", ".join(f"{one.policy} {one.tokens_per_s:,.0f}" for one in ranked[:3])
    sys.stdout.write(f"{'LOST ' if played.is_lost else ''}{cell}: {lead} ({perf_counter() - start_s:.0f} s)\n")
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


def summed(results: Sequence[PlayedCell]) -> Section:
    """Geometric means over the cells."""
    lines = []
    for name in ("padded", "static", "packed", "hotspa", "dcp-intra", "hydraulis", "best other"):
        ratios = [ratio for played in results if (ratio := played.over(name))]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            lines.append((name, str(len(ratios)), f"{mean:.3f}x", f"{min(ratios):.4f}x", f"{max(ratios):.2f}x"))
    lost = sum(played.is_lost for played in results)
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
                measured=f"{lost} of {sum(bool(played.speeds) for played in results)}",
                met=not lost,
            ),
        ),
    )


def rows(results: Sequence[PlayedCell]) -> Section:
    """One line a cell."""
    lines = []
    for played in results:
        lengths, model, cluster, tokens = played.cell
        cell = (lengths, model, cluster, f"{tokens:,}")
        if "auto" not in played.speeds:
            lines.append((*cell, "refused", "", "", ""))
            continue
        over, best = played.over("static"), played.over("best other")
        lines.append(
            (
                *cell,
                f"{played.speeds['auto']:,.0f}",
                f"{over:.2f}x" if over else "",
                f"{best:.3f}x {played.best_other[0]}" if best and played.best_other else "",
                f"{played.gap * 100:.1f} %",
            )
        )
    return Section(
        title="Cells",
        text="*Gap*: of `auto`'s time to a bound that no plan of the search space beats, median.",
        head=(
            "lengths",
            "model",
            "cluster",
            "tokens a step",
            "tokens/s",
            "over static",
            "over the best other",
            "median gap",
        ),
        rows=lines,
    )


if __name__ == "__main__":
    main()
