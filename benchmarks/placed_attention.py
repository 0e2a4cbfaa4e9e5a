"""What plans and real ranks gain where ranks that share a layer have short sequences whole on one of them each.

    python benchmarks/placed_attention.py --plan         # simulated: no torch, two minutes of one core
    python benchmarks/placed_attention.py --place        # the placements themselves: balance, what travels, seconds
    python benchmarks/placed_attention.py --measure 2    # two or four ranks: processes of one thread with Gloo

Planned: the same global batches with `local_sequences` false and true. Measured: forward and backward of a Llama, packs
of the same sequences in equal parts round a ring, placed, and under Ulysses, in turn. Each prints the rows of a table.
"""

import argparse
import os
from itertools import accumulate, product
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import numpy as np

import lengthwise
from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.core.specs import ModelSpec
from lengthwise.core.token_placement import Placement
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.space.placed_sequences import place_sequences

GIANT, SHORT = 32_768, 8_192
PLANNED = (
    ("llama-7b", "1x8xL40S-48GB", ["ring"]),
    ("llama-3-8b", "1x8xL40S-48GB", ["ring"]),
    ("llama-7b", "1x8xA800-80GB", ["ring"]),
    ("llama-7b", "1x8xH100-80GB", ["ring"]),
    ("llama-7b", "1x8xL40S-48GB", None),
    ("llama-7b", "8x8xH100-80GB", None),
)
"""Model, cluster and methods; None: those of the default search space."""
CORPORA, DEGREES, TOKENS = ("commoncrawl", "githubcode"), (2, 8, 64), (65_536, 1_048_576)
SPEC = ModelSpec(
    name="placed", num_layers=4, hidden_size=128, ffn_size=384, num_heads=8, num_kv_heads=4, head_size=16,
    vocab_size=512,
)  # fmt: skip
SIDES = {
    "ring, equal parts": (Method.RING, False),
    "ring, placed": (Method.RING, True),
    "ulysses": (Method.ULYSSES, False),
}
ROUNDS = 7


def print_plans() -> None:
    """Seconds of a step of one long sequence and as many tokens of short ones, both ways."""
    print(
        "| model | cluster | methods | equal parts | placed | faster by | micro-batches placed | gap |\n"
        + "| --- " * 8
        + "|"
    )
    lengths = np.concatenate([[GIANT], np.minimum(synthetic_lengths("commoncrawl", 400, seed=1), SHORT)])
    for model, cluster, methods in PLANNED:
        tokens = max(2 * GIANT, 8192 * int(cluster.split("x")[0]) * 8)
        chosen = np.tile(lengths, 1 + tokens // int(lengths.sum()))
        chosen = chosen[: int(np.searchsorted(np.cumsum(chosen), tokens))]
        (equal,), (placed,) = (
            lengthwise.plan(
                chosen, model=model, cluster=cluster, methods=methods, max_stages=1, steps=1,
                tokens_per_step=int(chosen.sum()), local_sequences=local,
            )
            for local in (False, True)
        )  # fmt: skip
        flags = [bool(m.placement) for p in placed.pipelines for m in p.micro_batches]
        print(
            f"| {model} | {cluster} | {', '.join(methods or ['default'])} | {equal.time_s:.3f} s | "
            f"{placed.time_s:.3f} s | **{equal.time_s / placed.time_s:.3f}x** | {sum(flags)} of {len(flags)} | "
            f"{equal.gap:.1%}, {placed.gap:.1%} |",
            flush=True,
        )


def packs_of(corpus: str, tokens: int, count: int) -> list[tuple[int, ...]]:
    """So many packs of about so many tokens, in the order of the draw."""
    lengths, rng = np.minimum(synthetic_lengths(corpus, 40_000, seed=3), tokens), np.random.default_rng(0)
    packs = []
    for _ in range(count):
        drawn = rng.permutation(lengths)
        packs.append(tuple(drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), tokens)))].tolist()))
    return packs


def print_placements() -> None:
    """How packs are placed: means over ten packs, the worst balance of any, and seconds without what is remembered."""
    print(
        "| lengths | ranks | tokens of a pack | sequences | tokens that travel | most tokens | most pairs | time |\n"
        + "| --- " * 8
        + "|"
    )
    for corpus, degree, tokens in product(CORPORA, DEGREES, TOKENS):
        placed, travel, spent_s = [], [], []
        packs = packs_of(corpus, tokens, 10)
        for pack in packs:
            place_sequences.cache_clear()
            begun_s = process_time()
            placed.append(place_sequences(pack, degree=degree, longest=tokens // (2 * degree), most_tokens=tokens))
            spent_s.append(process_time() - begun_s)
            whole = [n for n, pieces in zip(pack, placed[-1].placement) if len(pieces) == 1]
            travel.append(1 - sum(whole) / sum(pack))
        print(
            f"| {corpus} | {degree} | {tokens:,} | {fmean(map(len, packs)):.0f} | {fmean(travel):.0%} | "
            f"{max(p.of_mean_tokens for p in placed):.4f}x | {max(p.of_mean_pairs for p in placed):.4f}x | "
            f"{1e3 * median(spent_s):.1f} ms |",
            flush=True,
        )


def one_pass(method: Method, lengths: tuple[int, ...], placement: Placement) -> tuple[float, float]:
    """Seconds by the clock and of this processor of a forward and backward of a pack."""
    import torch
    import torch.distributed as dist
    from method_ranks import group, model_of

    from lengthwise.runtime.parallel.sharded_execution import StageExecution

    model = model_of(SPEC, WeightPlacement.WHOLE)
    tokens_T = torch.randint(SPEC.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    dist.barrier()
    begun_s, busy_s = perf_counter(), process_time()
    execution = StageExecution(
        model, group(), tokens_T=tokens_T, targets_T=tokens_T, cu_seqlens=tuple(accumulate(lengths, initial=0)),
        methods=(method,) * SPEC.num_layers, weights=WeightPlacement.WHOLE, placement=placement,
    )  # fmt: skip
    model.run(execution).backward()
    busy_s = process_time() - busy_s
    dist.barrier()
    return perf_counter() - begun_s, busy_s


def print_measured(num_ranks: int) -> None:
    """Medians of the ratios to the ring of equal parts in the same round."""
    from method_ranks import Ranks

    rng = np.random.default_rng(0)
    short = [tuple(np.clip(rng.lognormal(np.log(128), 0.9, 24), 16, 1024).astype(int).tolist()) for _ in range(3)]
    steps = {
        "short: lognormal, median 128": short,
        "one of 2,048 and as many tokens of short ones": [(2048, *pack) for pack in short],
        "one of 4,096 alone": [(4096,)],
    }
    print("| ranks | sequences of a pack | side | time | waiting |\n" + "| --- " * 5 + "|")
    ranks = Ranks(num_ranks)
    try:
        for name, packs in steps.items():
            spans: dict[str, list[float]] = {side: [] for side in SIDES}
            waits: dict[str, list[float]] = {side: [] for side in SIDES}
            for step in range(ROUNDS):
                for side, (method, is_placed) in SIDES.items():
                    found = [
                        ranks.run(one_pass, method, pack, placement_of(pack, num_ranks) if is_placed else ())
                        for pack in packs
                    ]
                    span_s = sum(max(span for span, _ in of_pack) for of_pack in found)
                    if step:  # the first makes buffers
                        spans[side].append(span_s)
                        waits[side].append(
                            1 - sum(busy for of_pack in found for _, busy in of_pack) / num_ranks / span_s
                        )
            base = spans["ring, equal parts"]
            for side in SIDES:
                ratio = median(mine / theirs for mine, theirs in zip(spans[side], base))
                print(f"| {num_ranks} | {name} | {side} | {ratio:.3f}x | {median(waits[side]):.1%} |", flush=True)
    finally:
        ranks.close()
    print(f"load average {os.getloadavg()[0]:.1f}")


def placement_of(pack: tuple[int, ...], degree: int) -> Any:
    """As plans place it, with room for a quarter more tokens."""
    most = sum(pack) * 5 // 4
    return place_sequences(pack, degree=degree, longest=most // (2 * degree), most_tokens=most).placement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--place", action="store_true")
    parser.add_argument("--measure", type=int, metavar="RANKS")
    options = parser.parse_args()
    if options.plan:
        print_plans()
    if options.place:
        print_placements()
    if options.measure:
        print_measured(options.measure)


if __name__ == "__main__":
    main()
