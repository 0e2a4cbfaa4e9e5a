"""Causal work of the busiest rank over the mean, for our token shards and contiguous ones; and what it costs a ring."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from time import perf_counter, process_time

import numpy as np
import torch
import torch.distributed as dist
from method_ranks import Ranks, group
from pages import Section, at_most

from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.runtime.models.attention_view import in_order
from lengthwise.runtime.parallel.attention_blocks import block_tasks
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.tokens import TokenShards, shard_tokens

DEGREES = (2, 3, 4, 8)
HEADS, HEAD_SIZE = 4, 16
Shard = Callable[[tuple[int, ...], int], TokenShards]


def zigzag(cu_seqlens: tuple[int, ...], degree: int) -> TokenShards:
    """Ours."""
    return shard_tokens(cu_seqlens, degree=degree, causal=True)


def runs_of_pack(cu_seqlens: tuple[int, ...], degree: int) -> TokenShards:
    """Rank r holds the r-th of p equal runs of the pack."""
    return TokenShards(places=tuple(np.array_split(np.arange(cu_seqlens[-1]), degree)))


def runs_of_sequences(cu_seqlens: tuple[int, ...], degree: int) -> TokenShards:
    """Rank r holds the r-th of p equal runs of every sequence."""
    cuts = [np.array_split(np.arange(start, end), degree) for start, end in pairwise(cu_seqlens)]
    return TokenShards(places=tuple(np.concatenate(mine) for mine in zip(*cuts)))


LAYOUTS: Mapping[str, Shard] = {
    "zigzag": zigzag, "runs of the pack": runs_of_pack, "runs of each sequence": runs_of_sequences,
}  # fmt: skip


def busiest_over_mean(cu_seqlens: tuple[int, ...], shards: TokenShards) -> float:
    """Of the pairs of tokens that a causal mask leaves to each rank's queries."""
    offsets = in_order(cu_seqlens, causal=True).offsets
    pairs = [int((offsets[places] + 1).sum()) for places in shards.places]
    return max(pairs) / mean(pairs)


def work_section() -> Section:
    """In whole numbers, without running anything."""
    rows, worst = [], 0.0
    for name, packs in _packs().items():
        for degree in DEGREES:
            found = {
                layout: [busiest_over_mean(pack, shard(pack, degree)) for pack in packs]
                for layout, shard in LAYOUTS.items()
            }
            rows.append([name, len(packs), degree, *(cell for each in found.values() for cell in _cells(each))])
            worst = max(worst, *found["zigzag"])
    return Section(
        title="Causal balance: pairs of tokens",
        text="Pairs that the busiest rank attends over the mean of the ranks, in attention over shards (`ring`, "
        "`megatron_cz`, `colossal_z`, `metp`). *Zigzag* is ours; *runs of the pack* cuts the pack in p pieces, *runs "
        "of each sequence* every sequence in p pieces. Packs of 32,768 tokens, the last sequence cut to fit; median, "
        "and highest of all packs.",
        head=("packs", "number", "ranks", *(f"{name}, {what}" for name in LAYOUTS for what in ("median", "highest"))),
        rows=rows,
        goals=(at_most("pairs of the busiest rank over the mean, zigzag, every pack and degree", worst, 1.02, "x"),),
    )


def _packs(num_tokens: int = 32_768, count: int = 10) -> dict[str, list[tuple[int, ...]]]:
    names = ("commoncrawl", "githubcode", "grch38")
    drawn = {f"like {name}": [_filled(name, seed, num_tokens) for seed in range(count)] for name in names}
    return {"one sequence": [(0, num_tokens)], **drawn, "sequences of 64": [tuple(range(0, num_tokens + 1, 64))]}


def _filled(name: str, seed: int, num_tokens: int) -> tuple[int, ...]:
    ends = np.minimum(np.cumsum(synthetic_lengths(name, 4096, seed)[1:]), num_tokens)
    return (0, *np.unique(ends).tolist())


def _cells(ratios: Sequence[float]) -> tuple[str, str]:
    return f"{median(ratios):.3f}", f"{max(ratios):.3f}"


def time_section(ranks: Mapping[int, Ranks], *, num_tokens: int, rounds: int) -> Section:
    """Ring attention, forward and backward, under each layout."""
    packs = {
        "one sequence": (0, num_tokens),
        "like commoncrawl": _filled("commoncrawl", 0, num_tokens),
        "like grch38": _filled("grch38", 0, num_tokens),
    }
    rows = []
    for degree in sorted(set(ranks) - {1}):
        for name, pack in packs.items():
            seen: dict[str, list[tuple[float, float, float]]] = {layout: [] for layout in LAYOUTS}
            for number in range(rounds + 1):  # the first warms up
                for layout in LAYOUTS:
                    found = ranks[degree].run(ring_seconds, pack, layout)
                    busy = [processor_s for _, processor_s in found]
                    if number:
                        seen[layout].append((max(clock_s for clock_s, _ in found), max(busy) / mean(busy), sum(busy)))
            for layout, values in seen.items():
                over, work = (
                    median(theirs[at] / ours[at] for theirs, ours in zip(values, seen["zigzag"])) for at in (0, 2)
                )
                pairs = busiest_over_mean(pack, LAYOUTS[layout](pack, degree))
                cells = [f"{pairs:.2f}", f"{median(busy for _, busy, _ in values):.2f}", f"{work:.2f}", f"{over:.2f}"]
                rows.append([degree, name, layout, *cells])
    return Section(
        title="Causal balance: ring attention",
        text=f"Attention alone, forward and backward, {HEADS} heads of {HEAD_SIZE}, {num_tokens:,} tokens, medians of "
        f"{rounds} rounds. *Processor*: seconds of processor, of the busiest rank over the mean, and of all ranks over "
        "zigzag's. *Time* is by the clock, over zigzag's. On four ranks that share two cores the clock hides "
        "imbalance: what one rank leaves idle another uses.",
        head=(
            "ranks",
            "pack",
            "layout",
            "pairs, busiest over mean",
            "processor, busiest over mean",
            "processor, all over zigzag's",
            "time over zigzag's",
        ),
        rows=rows,
        after="Where *all over zigzag's* is below 1, zigzag makes more work in all: it cuts every sequence in 2 p "
        "chunks, and on packs of short ones that is many small blocks. There runs of the pack can be faster, though "
        "not balanced.",
    )


def ring_seconds(cu_seqlens: tuple[int, ...], layout: str) -> tuple[float, float]:
    """Seconds by the clock, and of this rank's processor."""
    ring = ring_of(cu_seqlens, LAYOUTS[layout](cu_seqlens, group().size))
    generator = torch.Generator().manual_seed(group().rank)
    shape = (ring.sizes[group().rank], HEADS, HEAD_SIZE)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    dist.barrier()
    clock_s, processor_s = perf_counter(), process_time()
    out = ring_attention(q, k, v, ring)
    out.backward(torch.ones_like(out))
    return perf_counter() - clock_s, process_time() - processor_s


def ring_of(cu_seqlens: tuple[int, ...], shards: TokenShards) -> Ring:
    """The ring of this rank, for any shards whose places ascend."""
    view = in_order(cu_seqlens, causal=True)
    tasks = [block_tasks(view, shards, rank=group().rank, source=source) for source in range(group().size)]
    return Ring(group=group(), sizes=shards.sizes, tasks=tuple(tasks))
