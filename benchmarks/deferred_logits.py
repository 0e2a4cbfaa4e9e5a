"""Loss of a transformers model with and without the matrix of logits: seconds and peak bytes of forward and backward.

    python benchmarks/deferred_logits.py [--rounds 3] [--tokens 4096]

Sides take turns, each in a process of its own; figures are medians of ratios within a round.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

from measure import save

VOCAB = 128_256
"""That of Llama 3."""
MODELS = ("Llama", "Gemma2")
"""The second caps its logits, so that chunks are computed twice."""


def measure(name: str, tokens: int, *, deferred: bool) -> dict[str, float]:
    """Seconds and bytes above those of the model of the second of two passes."""
    import torch
    import transformers

    from lengthwise.runtime.wrap.deferred_logits import DeferredHead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": VOCAB}
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=4, num_key_value_heads=4)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    if deferred:
        DeferredHead(model, is_plain=lambda: False)
    ids = torch.randint(0, VOCAB, (1, tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        model.zero_grad()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        seconds = time.perf_counter() - began
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "bytes": 1024.0 * kib, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        name, side = options.side
        print(json.dumps(measure(name, options.tokens, deferred=side == "deferred")))
        return
    results = {}
    for name in MODELS:
        rounds = []
        for _ in range(options.rounds):
            sides = {side: _run(name, side, options.tokens) for side in ("stock", "deferred")}
            assert abs(sides["stock"]["loss"] - sides["deferred"]["loss"]) < 1e-5 * sides["stock"]["loss"]
            rounds.append(sides)
        results[name] = {
            figure: median(sides["deferred"][figure] / sides["stock"][figure] for sides in rounds)
            for figure in ("seconds", "bytes")
        } | {
            f"{side}_{figure}": median(sides[side][figure] for sides in rounds)
            for side in ("stock", "deferred")
            for figure in ("seconds", "bytes")
        }
        print(name, results[name], flush=True)
    record = {"tokens": options.tokens, "vocab_size": VOCAB, "rounds": options.rounds, "models": results}
    save("deferred_logits", record)


def _run(name: str, side: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--tokens", str(tokens), "--side", name, side]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
