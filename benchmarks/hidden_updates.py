"""Seconds of a step of a prepared model whose update moves beneath passes, over one whose update is exposed.

    python benchmarks/hidden_updates.py [--ranks 2] [--rounds 5] [--steps 3] [--gbit 2]

The same Llama with weights whole, twice on the same ranks (processes of one thread joined by Gloo): as the runtime
does it, and with gradients pushed after the last backward and all weights waited for before `step.update()` returns.
Both take turns of some steps, after which all weights are waited for; figures are medians of ratios within a round.
Ranks that share processors cannot show what overlap is for: a message takes the core that it would leave idle
elsewhere. `--gbit` therefore limits the loopback to that rate by the kernel's token bucket, in a network namespace of
its own (Linux; `unshare`, `ip`, `tc`): bytes then take time, and hardly any processor.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measure import save
from method_ranks import Ranks

SIDES = ("exposed", "hidden")
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 4_096}


def train(num_rounds: int, steps: int, tokens: int) -> list[dict[str, dict[str, float]]]:
    """Seconds of a step and of its update by side, medians of each round."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import lengthwise

    ranks, runs, losses = torch.distributed.get_world_size(), {}, list[tuple[int, float]]()
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, SIZES["vocab_size"], tokens) for _ in range(2 * ranks)]
    for side in SIDES:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
        run = lengthwise.prepare(
            model, rows, sequences_per_step=2 * ranks, steps=num_rounds * steps + 1, policy="static", max_degree=1,
            recompute="none", weights="whole", device="cpu", check=False, verbose=False,
            profile=Path(tempfile.gettempdir(), f"hidden-{os.getppid()}-{side}.json"),
        )  # fmt: skip
        if side == "exposed":
            run.begin_update = run.state.clear_gradient
        runs[side] = run, run.steps()
    found = []
    for number in range(num_rounds + 1):  # the first is not counted
        figures = {}
        for side, (run, own_steps) in runs.items():
            torch.distributed.barrier()
            began, update_s, count = time.perf_counter(), 0.0, steps if number else 1
            for _ in range(count):
                step = next(own_steps)
                for micro_batch in step:
                    step.backward(run.model(**micro_batch.inputs).loss)
                computed = time.perf_counter()
                losses.append((number, step.update().loss))
                update_s += time.perf_counter() - computed
            waiting = time.perf_counter()
            run.state.finish_pull()
            ended = time.perf_counter()
            figures[side] = {"step": (ended - began) / count, "update": (update_s + ended - waiting) / count}
        found.append(figures)
    assert losses[0][1] == losses[1][1], "both sides train alike"
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of each of two sequences a rank and step")
    parser.add_argument("--gbit", type=float, help="limit the loopback to this rate")
    options = parser.parse_args()
    if options.gbit is not None and "LIMITED" not in os.environ:
        limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {options.gbit}gbit burst 256kb limit 64mb"
        again = ["unshare", "--net", "--map-root-user", "sh", "-c", f'{limit} && exec "$@"', "sh", sys.executable]
        sys.exit(subprocess.run([*again, *sys.argv], env={**os.environ, "LIMITED": "1"}).returncode)
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = Ranks(options.ranks)
    try:
        by_rank = ranks.run(train, options.rounds, options.steps, options.tokens)
    finally:
        ranks.close()
    rounds = [
        {side: {name: max(one[number][side][name] for one in by_rank) for name in ("step", "update")} for side in SIDES}
        for number in range(options.rounds)
    ]
    for figures in rounds:
        print(figures, flush=True)
    ratios = sorted(figures["hidden"]["step"] / figures["exposed"]["step"] for figures in rounds)
    save(
        f"hidden_updates_{options.ranks}{'' if options.gbit is None else f'_{options.gbit:g}gbit'}",
        {
            "ranks": options.ranks, "rounds": options.rounds, "gbit": options.gbit, "load": os.getloadavg()[0],
            "step_over_exposed": median(ratios), "least": ratios[0], "most": ratios[-1],
            "exposed_update_share": median(f["exposed"]["update"] / f["exposed"]["step"] for f in rounds),
            "hidden_update_share": median(f["hidden"]["update"] / f["hidden"]["step"] for f in rounds),
            "seconds": {side: median(f[side]["step"] for f in rounds) for side in SIDES},
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
