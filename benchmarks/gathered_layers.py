"""Peak bytes and seconds of an 8-layer Llama under `prepare`: weights whole, or gathered layer by layer.

    python benchmarks/gathered_layers.py [--rounds 2] [--ranks 4] [--steps 3]

Beside both, weights whole with the model's own logits of all tokens. No gathered layer stays whole, as where memory is
scarce; by default plans keep what fits. Sides take turns, each on new ranks, processes of
one thread joined by Gloo; figures are medians of ratios within a round. Bytes are the most resident ones of a rank's
process, as the kernel counts them, in all steps but the first, beside what it had before its model was made.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure import save
from method_ranks import Ranks

SIDES = {"whole, all logits": ("whole", False), "whole": ("whole", True), "by layer": ("by-layer", True)}
"""`weights` of `prepare`, and whether the loss is made without all logits."""
BASE = "whole, all logits"
TOKENS = 1024
"""Of each sequence, one for each rank and step."""
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 32_000}
"""With the vocabulary of Llama 2."""


def train(weights: str, defers: bool, steps: int) -> dict[str, float]:
    """Seconds of the median step after the first, and the most bytes of this rank's process in them."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import lengthwise
    from lengthwise.runtime.wrap.deferred_logits import DeferredHead
    from lengthwise.session.demo_settings import NUM_RANKS  # noqa: F401 - all is imported before bytes are counted

    if not defers:
        DeferredHead.__init__ = _defer_nothing  # type: ignore[method-assign]
    torch.manual_seed(0)
    _forget_peak()
    before = _peak_bytes()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    rng, ranks = np.random.default_rng(0), torch.distributed.get_world_size()
    rows = [rng.integers(0, SIZES["vocab_size"], TOKENS) for _ in range(ranks * (steps + 1))]
    profile = Path(tempfile.gettempdir(), f"gathered-{os.getppid()}-{weights}-{defers}.json")
    run = lengthwise.prepare(
        model, rows, sequences_per_step=ranks, steps=steps + 1, policy="static", max_degree=1, recompute="all",
        weights=weights, device="cpu", check=False, verbose=False, profile=profile,
    )  # fmt: skip
    if weights == "by-layer":
        run.keep_layers = lambda plan: 0
    seconds = []
    for step in run.steps():
        began = time.perf_counter()
        if step.number == 1:
            _forget_peak()
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs).loss)
        result = step.update()
        seconds.append(time.perf_counter() - began)
    profile.unlink(missing_ok=True)
    return {"seconds": median(seconds[1:]), "bytes": float(_peak_bytes() - before), "loss": result.loss}


def _defer_nothing(self: Any, model: Any, **options: Any) -> None:
    self._forward, self.parameters = None, []


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The most resident bytes since :func:`_forget_peak`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
    rounds = []
    for _ in range(options.rounds):
        sides = {}
        for side, (weights, defers) in SIDES.items():
            ranks = Ranks(options.ranks)
            try:
                found = ranks.run(train, weights, defers, options.steps)
            finally:
                ranks.close()
            sides[side] = {name: max(one[name] for one in found) for name in found[0]}
            print(side, sides[side], flush=True)
        losses = [side["loss"] for side in sides.values()]
        assert max(losses) - min(losses) < 1e-4 * losses[0], losses
        rounds.append(sides)
    figures = {
        side: {
            f"{name}_over_base": median(sides[side][name] / sides[BASE][name] for sides in rounds)
            for name in ("seconds", "bytes")
        }
        | {name: median(sides[side][name] for sides in rounds) for name in ("seconds", "bytes")}
        for side in SIDES
    }
    save("gathered_layers", {"ranks": options.ranks, "rounds": options.rounds, "tokens": TOKENS, "sides": figures})


if __name__ == "__main__":
    main()
