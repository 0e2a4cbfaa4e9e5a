"""Batches within a token budget: ours beside DeepSpeed's, and packing beside trl's, LLaMA-Factory's and axolotl's.

    python benchmarks/batching.py [--quick] [--peers DIR] [--limit 30]

Lengths are drawn from published distributions. Everything runs in this process on one core and is timed in seconds of
the processor, so that a busy machine does not count; a peer is left out at more sequences once its growth says that it
would take longer than the limit. Writes batching.md and results/batching.json.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from batching_peers import TRL_ROWS, Batching, load
from pages import Cell, Goal, Section, at_most, on_one_core, say, write

from lengthwise.core.lengths import LengthIndex
from lengthwise.data.batch_budget import Budget
from lengthwise.data.curriculum import PACINGS
from lengthwise.data.order import OrderSettings, make_order
from lengthwise.data.sampler import Sampler
from lengthwise.data.sort_key import by_length
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.solve.binpack import first_fit_decreasing

BUDGETS = {"commoncrawl": 8192, "githubcode": 65_536}
SIZES = (1000, 2000, 4000, 10_000, 100_000, 1_000_000)
ONE_MILLION_S = 2.0
WINDOW = 4096
TITLE = "Batches within a token budget"
FIRST = (
    "Lengths drawn from the distributions of `lengthwise.data.synthetic`: `commoncrawl` in batches of {commoncrawl:,} "
    "tokens, `githubcode` of {githubcode:,}; some sequences are longer than that. One core, one process; seconds of "
    "the processor.{quick}"
)
PADDED = (
    "Sequences of a micro-batch are padded to its longest. *Lost*: sequences that are in no batch. *Largest*: computed "
    "tokens, padding included, of the largest batch of more than one sequence, over the budget. *Padding*: share of "
    "all computed tokens. DeepSpeed's `batch_by_seqlens` is the package's own function ({limit:g} s were the limit); "
    "ours counts padding, in random order and in random order sorted within windows of {window:,}."
)
PACKED = (
    "Packs of at most the budget, no padding computed. *Lost*: tokens in no pack. *Cut*: sequences that lie in several "
    "packs. *Unfilled*: what packs have less than the budget, share of it, sequences over the budget left out: what a "
    "pack of a fixed size computes for nothing. trl packs {trl:,} rows at a time, as it does by default; ours packs "
    "the order as it comes, or first fit decreasing within windows of {window:,}."
)
OPTIONS = (
    "One million sequences of `commoncrawl`, budget {budget:,}: arranging the epoch, cutting it, and shuffling its "
    "batches. Median of {rounds}."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 10,000 sequences, peers to 3 s; for a look")
    parser.add_argument("--peers", type=Path, help="folder with their sources, see batching_peers.py")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds a peer may take")
    given = parser.parse_args()
    on_one_core()
    sizes, limit, rounds = (SIZES[:4], 3.0, 1) if given.quick else (SIZES, given.limit, 3)
    peers = load(given.peers)
    ours_padded = {name: Padded(name) for name in ("shuffled", "windowed")}
    ours_packed: dict[str, Batching] = {"**ours**, in order": _in_order, "**ours**, first fit": _first_fit}
    padded = {name: peer for name, peer in peers.items() if name.startswith("DeepSpeed")}
    packed = {name: peer for name, peer in peers.items() if name not in padded} | ours_packed
    padded |= {f"**ours**, {name}": peer for name, peer in ours_padded.items()}
    sections = [
        say(padded_section(measure(padded, sizes, limit), limit)),
        say(packed_section(measure(packed, sizes, limit))),
        say(options_section(sizes[-1], rounds)),
    ]
    first = FIRST.format(**BUDGETS, quick=" **A quick run.**" if given.quick else "")
    write("batching", title=TITLE, first=first, sections=sections)


class Padded:
    """Our batches of an order, padding counted."""

    def __init__(self, order: str) -> None:
        self._settings = OrderSettings(order=order, window=WINDOW)

    def __call__(self, lengths: np.ndarray, budget: int) -> tuple[Sequence[Sequence[int]], int]:
        index = LengthIndex(lengths=lengths)
        order = make_order(self._settings, by_length(index))
        ids, ends = Sampler(index, seed=0, budget=Budget(tokens=budget, padded=True), order=order).arrange(0)
        return _split(ids, ends), 0


def _split(ids: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    return [ids[start:end] for start, end in pairwise([0, *ends.tolist()])]


def timed(call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, float]:
    """What ``call`` returns, and the seconds of the processor it takes."""
    start_s = process_time()
    result = call(*arguments, **named)
    return result, process_time() - start_s


def _in_order(lengths: np.ndarray, budget: int) -> tuple[Sequence[Sequence[int]], int]:
    ids, ends = Sampler(LengthIndex(lengths=lengths), seed=0, tokens_per_step=budget).arrange(0)
    return _split(ids, ends), 0


def _first_fit(lengths: np.ndarray, budget: int) -> tuple[Sequence[Sequence[int]], int]:
    ids, _ = Sampler(LengthIndex(lengths=lengths), seed=0, tokens_per_step=budget).arrange(0)
    packs = [[i] for i in ids[lengths[ids] > budget].tolist()]
    ids = ids[lengths[ids] <= budget]
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        packs += [window[pack].tolist() for pack in first_fit_decreasing(lengths[window].tolist(), budget)]
    return packs, 0


def measure(sides: dict[str, Batching], sizes: Sequence[int], limit: float) -> dict[tuple[str, str, int], Any]:
    """(corpus, side, size) -> batches, tokens lost, seconds; None where a side would be over the limit."""
    found: dict[tuple[str, str, int], Any] = {}
    for corpus, budget in BUDGETS.items():
        for name, side in sides.items():
            times: list[tuple[int, float]] = []
            for size in sizes:
                if "ours" not in name and _next_s(times, size) > limit:
                    found[corpus, name, size] = None
                    continue
                lengths = synthetic_lengths(corpus, size)
                (batches, lost), seconds = timed(side, lengths, budget)
                times.append((size, seconds))
                found[corpus, name, size] = (lengths, batches, lost, seconds)
                sys.stdout.write(f"{corpus} {name} {size:,}: {seconds:.2f} s\n")
    return found


def _next_s(times: Sequence[tuple[int, float]], size: int) -> float:
    """About what ``size`` sequences would take: growth goes on as between the last two, at least in proportion."""
    if not times:
        return 0.0
    last_size, last_s = times[-1]
    power = 1.0  # and as the cube of sequences at most: one slow measurement is not the growth
    for (small, small_s), (large, large_s) in pairwise(times[-2:]):
        power = max(power, float(np.log(max(large_s, 1e-9) / max(small_s, 1e-9)) / np.log(large / small)))
    return last_s * (size / last_size) ** min(power, 3.0)


def padded_section(found: dict[tuple[str, str, int], Any], limit: float) -> Section:
    """Time, sequences lost, padding."""
    rows: list[list[Cell]] = []
    lost_by_us, over_by_us, slowest = 0, 0.0, 0.0
    for (corpus, name, size), result in found.items():
        if result is None:
            rows.append([corpus, name, f"{size:,}", f"over {limit:g} s", None, None, None])
            continue
        lengths, batches, _, seconds = result
        counts = np.array([len(ids) for ids in batches])
        computed = np.array([int(lengths[ids].max()) * len(ids) for ids in batches])
        kept = sum(int(lengths[ids].sum()) for ids in batches)
        largest = float(computed[counts > 1].max()) / BUDGETS[corpus]
        rows.append(
            [corpus, name, f"{size:,}", f"{seconds:.3f} s", f"{size - counts.sum():,}", f"{largest:.2f}",
             f"{1 - kept / computed.sum():.1%}"]
        )  # fmt: skip
        if "ours" in name:
            lost_by_us += int(size - counts.sum())
            over_by_us, slowest = max(over_by_us, largest), max(slowest, seconds)
    most = max(size for _, _, size in found)
    goals = (
        at_most(f"seconds for {most:,} sequences, padding counted", slowest, ONE_MILLION_S, "s"),
        at_most("sequences lost by ours", lost_by_us, 0, ""),
        at_most("largest batch of ours over its budget", over_by_us, 1.0, "x"),
    )
    head = ("lengths", "side", "sequences", "time", "lost", "largest", "padding")
    return Section(
        title="Padded batches", text=PADDED.format(limit=limit, window=WINDOW), head=head, rows=rows, goals=goals
    )


def packed_section(found: dict[tuple[str, str, int], Any]) -> Section:
    """Time, tokens lost, what packs have left."""
    rows: list[list[Cell]] = []
    for (corpus, name, size), result in found.items():
        if result is None:
            rows.append([corpus, name, f"{size:,}", "over the limit", None, None, None])
            continue
        lengths, batches, lost, seconds = result
        budget, total = BUDGETS[corpus], int(lengths.sum())
        over = lengths > budget
        cut = sum(len(ids) for ids in batches) - len({i for ids in batches for i in ids})
        alone = 0 if "trl" in name else sum(bool(over[ids[0]]) for ids in batches)
        held = total - lost - (0 if "trl" in name else int(lengths[over].sum()) - lost)
        unfilled = 1 - held / ((len(batches) - alone) * budget)
        rows.append(
            [corpus, name, f"{size:,}", f"{seconds:.3f} s", f"{lost / total:.2%}", f"{cut:,}", f"{unfilled:.2%}"]
        )
    text = PACKED.format(trl=TRL_ROWS, window=WINDOW)
    return Section(
        title="Packs", text=text, head=("lengths", "side", "sequences", "time", "lost", "cut", "unfilled"), rows=rows
    )


def options_section(size: int, rounds: int) -> Section:
    """Every order and budget of ours at the largest size."""
    tokens = BUDGETS["commoncrawl"]
    index = LengthIndex(lengths=synthetic_lengths("commoncrawl", size))
    orders = {name: OrderSettings(order=name) for name in ("shuffled", "sorted", "windowed")}
    orders |= {f"curriculum, {pacing}": OrderSettings(order="curriculum", pacing=pacing) for pacing in PACINGS}
    budgets = {
        "sum": Budget(tokens=tokens),
        "padded": Budget(tokens=tokens, padded=True),
        "padded, 4 to 64 sequences": Budget(tokens=tokens, padded=True, min_sequences=4, max_sequences=64),
        "8 micro-batches of one shape": Budget(tokens=tokens, padded=True, equal_shapes=8),
    }
    rows: list[list[Cell]] = []
    slowest = 0.0
    for order_name, settings in orders.items():
        row: list[Cell] = [order_name]
        for budget in budgets.values():
            order = make_order(settings, by_length(index))
            sampler = Sampler(index, seed=0, budget=budget, order=order)
            times = [timed(sampler.arrange, 0)[1] for _ in range(rounds)]
            slowest = max(slowest, median(times))
            row.append(f"{median(times):.2f} s")
        rows.append(row)
    goal: Goal = at_most(f"seconds for {size:,} sequences, slowest of all options", slowest, ONE_MILLION_S, "s")
    text = OPTIONS.format(budget=tokens, rounds=rounds).replace("One million", f"{size:,}")
    return Section(title="All options", text=text, head=("order", *budgets), rows=rows, goals=(goal,))


if __name__ == "__main__":
    main()
