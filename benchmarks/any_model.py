"""Models that are not ours under DCP's policies and `auto`, beside `static`, `bucket` and other trainers.

    python benchmarks/any_model.py [--quick] [--rounds 2] [--steps 4] [--ranks 2 4] [--peers DIR]

The other trainers are transformers' Trainer, a loop with FSDP2 and, with --peers (peers.txt), trl's SFTTrainer.

Ranks are processes of one thread joined by Gloo, started here. All sides of a model and a set of lengths take turns in
every round; figures are medians of ratios within a round. Writes any_model.md and results/any_model.json.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping
from statistics import mean, median

from any_model_peers import train_with_fsdp2, train_with_trainer, train_with_trl
from any_model_runs import KINDS, LENGTHS, POWERS, TOKENS, memory_gib, train
from method_ranks import Ranks
from pages import Cell, Goal, Section, at_least, at_most, number, say, write

TITLE = "Any model: dynamic degree, accumulation and recompute"
FIRST = (
    "{ranks} ranks, processes of one thread joined by Gloo, on one machine of two cores: four of them share two cores. "
    "Sequences of {shortest} to {longest:,} tokens, doubling, {tokens:,} tokens a step. *short*: a length l is drawn "
    "with probability proportional to l^{short:g}; *balanced*: l^{balanced:g}; *long*: l^{long:g}. A device has memory "
    "for the longest sequence shared by all ranks, half of the layers recomputed, and no more. Load average "
    "{load}.{quick}"
)
TEXT = (
    "Medians over {rounds} rounds of {steps} steps each, after one that is not timed. *Tokens/s over bucket*: of the "
    "same round; `bucket` is DCP's baseline, a fixed degree with the best batch size per bucket, tuned; `static` a "
    "fixed scheme, tuned. *Idle*: the mean over ranks of the time in which a rank computes no micro-batch while the "
    "fullest one does. *Off*: predicted over measured seconds of a step, how far from 1, median. *Degree*: the highest "
    "in the last step. The trainers of others pad batches of like lengths, four sequences to a rank: transformers' "
    "Trainer under DistributedDataParallel, trl's SFTTrainer with its default loss, and a loop with FSDP2 layer by "
    "layer (transformers' Trainer shards on GPUs alone)."
)
SIDES = ("bucket", "static", "dcp-inter", "dcp-intra", "auto")
PEERS = {
    "transformers' Trainer": train_with_trainer,
    "FSDP2": train_with_fsdp2,
    "trl's SFTTrainer": train_with_trl,
}
NEEDS_FOLDER = "trl's SFTTrainer"
Found = dict[tuple[int, str, str, str], list[dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of two steps; for a look")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--peers", help="folder where the packages of peers.txt are installed")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate would start as many threads as there are cores in every rank
    rounds, steps = (1, 2) if options.quick else (options.rounds, options.steps)
    loads, found = [os.getloadavg()[0]], Found()
    with tempfile.TemporaryDirectory() as work:
        for count in options.ranks:
            measure(count, found, rounds=rounds, steps=steps, work=work, peers=options.peers)
    loads.append(os.getloadavg()[0])
    first = FIRST.format(
        ranks=" and ".join(map(str, options.ranks)), shortest=LENGTHS[0], longest=LENGTHS[-1], tokens=TOKENS,
        load=" to ".join(f"{load:.1f}" for load in loads), quick=" **A quick run.**" if options.quick else "", **POWERS,
    )  # fmt: skip
    sections = [say(section(found, count, rounds=rounds, steps=steps)) for count in options.ranks]
    write("any_model", title=TITLE, first=first, sections=sections)


def measure(count: int, found: Found, *, rounds: int, steps: int, work: str, peers: str | None) -> None:
    """All models and lengths on ``count`` ranks."""
    ranks = Ranks(count)
    try:
        for kind in KINDS:
            limit = ranks.run(memory_gib, kind, work)[0]
            for _ in range(rounds):
                for drawn in POWERS:
                    for side in SIDES:
                        result = ranks.run(train, kind, drawn, side, steps, limit, work)[0]
                        found.setdefault((count, kind, drawn, side), []).append(result)
                    if kind.startswith("llama"):
                        for side, train_peer in PEERS.items():
                            if side != NEEDS_FOLDER or peers:
                                folder = [peers] * (side == NEEDS_FOLDER)
                                result = ranks.run(train_peer, drawn, steps, *folder)[0]
                                found.setdefault((count, kind, drawn, side), []).append(result)
    finally:
        ranks.close()


def section(found: Mapping[tuple[int, str, str, str], list[dict[str, float]]], count: int, **sizes: int) -> Section:
    """The table of one number of ranks."""
    rows: list[list[Cell]] = []
    idle, ratios, errors = [], [], []
    over_peers: dict[str, list[float]] = {}
    for (ranks, kind, drawn, side), results in found.items():
        if ranks != count:
            continue
        base = found[ranks, kind, drawn, "bucket"]
        speeds = [mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in zip(results, base)]
        speed = median(r["tokens_per_s"] for r in results)
        row: list[Cell] = [kind, drawn, side, f"{speed:,.0f}", f"{median(speeds):.2f}"]
        if "idle" in results[0]:
            row += [f"{median(r[name] for r in results):.1%}" for name in ("idle", "error")]
            row += [f"{max(r['max_degree'] for r in results):.0f}"]
        rows.append(row + [None] * (8 - len(row)))
        if side == "dcp-intra":
            idle.append(mean(r["idle"] for r in results))
            errors += [r["error"] for r in results]
            ratios.append(median(speeds))
        if side in PEERS:
            ours = found[ranks, kind, drawn, "auto"]
            ratio = median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, results))
            over_peers.setdefault(side, []).append(ratio)
    goals: list[Goal] = [
        at_most(f"{count} ranks: idle of dcp-intra, mean (published code: 6 to 23 %)", mean(idle), 0.05, "%"),
        at_least(f"{count} ranks: tokens/s of dcp-intra over bucket, worst model and lengths", min(ratios), 1.0, "x"),
        Goal(
            what=f"{count} ranks: seconds of a step predicted by dcp-intra, off by (median)", aim="within 10.00 %",
            measured=number(median(errors), "%"), met=median(errors) <= 0.1,
        ),
    ]  # fmt: skip
    goals += [
        at_least(f"{count} ranks: tokens/s of auto over {side}, worst lengths", min(over), 1.0, "x")
        for side, over in over_peers.items()
    ]
    return Section(
        title=f"{count} ranks", text=TEXT.format(**sizes),
        head=("model", "lengths", "side", "tokens/s", "over bucket", "idle", "off", "degree"), rows=rows,
        goals=tuple(goals),
    )  # fmt: skip


if __name__ == "__main__":
    main()
