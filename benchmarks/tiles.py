"""Feed-forward tiles: bytes and seconds of a long sequence, with every layer recomputed or none, in tiles or whole.

    python benchmarks/tiles.py [--tokens 8192] [--tile 512] [--rounds 2]

An 8-layer Llama whose feed-forward modules are four times as wide as its hidden states, on one rank of one thread.
Sides take turns, each in a new process; bytes are the most resident ones of the process beyond what it had
when its model was there, as the kernel counts them, in the step after the first.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from gathered_layers import _forget_peak, _peak_bytes
from method_ranks import Ranks
from pages import Section, at_least, write

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}
SIDES = {
    "none, whole": ("none", False),
    "none, tiles": ("none", True),
    "all, whole": ("all", False),
    "all, tiles": ("all", True),
}


def train(tokens: int, recompute: str, tile: int | None, folder: str) -> dict[str, float]:
    """CPU seconds and the most bytes of the second of two steps of one sequence, and the loss."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import lengthwise

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=4, use_cache=False, max_position_embeddings=tokens
    )
    model = LlamaForCausalLM(config)
    rows = [np.random.default_rng(number).integers(0, SIZES["vocab_size"], tokens) for number in range(2)]
    run = lengthwise.prepare(
        model, rows, sequences_per_step=1, steps=2, recompute=recompute, feed_forward_tile=tile, device="cpu",
        check=False, verbose=False, memory_gib=64, profile=Path(folder, f"{recompute}-{tile}.json"),
    )  # fmt: skip
    for step in run.steps():
        before = _peak_bytes() if step.number == 0 else _forgotten()
        began = time.process_time()
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs).loss)
        result = step.update()
        seconds, most = time.process_time() - began, _peak_bytes() - before
    run.close()
    return {"seconds": seconds, "bytes": float(most), "loss": result.loss}


def _forgotten() -> int:
    _forget_peak()
    return _peak_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            sides = {}
            for side, (recompute, in_tiles) in SIDES.items():
                ranks = Ranks(1)
                try:
                    (sides[side],) = ranks.run(
                        train, options.tokens, recompute, options.tile if in_tiles else None, folder
                    )
                finally:
                    ranks.close()
                print(side, sides[side], flush=True)
            losses = [side["loss"] for side in sides.values()]
            assert max(losses) - min(losses) < 1e-4 * losses[0], losses
            rounds.append(sides)
    base = {name: median(sides["none, whole"][name] for sides in rounds) for name in ("seconds", "bytes")}
    rows, found = [], {}
    for side in SIDES:
        recompute, tiles = side.split(", ")
        found[side] = {name: median(sides[side][name] for sides in rounds) for name in base}
        ratios = [f"{found[side][name] / base[name]:.2f}x" for name in ("bytes", "seconds")]
        rows.append((recompute, tiles, f"{found[side]['bytes'] / 2**20:,.0f} MiB", *ratios))
    shorter = found["none, whole"]["bytes"] / found["none, tiles"]["bytes"]
    write(
        "tiles",
        title="Feed-forward tiles",
        first=(
            f"Measured: one step of a sequence of {options.tokens:,} tokens of an 8-layer Llama (hidden size 256, "
            f"feed-forward 1,024) on one CPU rank of one thread, tiles of {options.tile} tokens, "
            f"median of {options.rounds} rounds."
        ),
        sections=[
            Section(
                title="Bytes and seconds of a step",
                text="Ratios are over no recompute without tiles.",
                head=("recomputed layers", "feed-forward", "bytes", "of bytes", "of CPU seconds"),
                rows=rows,
                goals=(at_least("fewer bytes by tiles, no layer recomputed", shorter, 1.5, "x"),),
                measured=("bytes", "of bytes", "of CPU seconds"),
            )
        ],
    )


if __name__ == "__main__":
    main()
