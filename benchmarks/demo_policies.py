"""Tokens per second of `auto` beside `padded`, `static` and transformers' Trainer, on the demo's corpus and model.

Every side trains the same sequences on two ranks of one thread each. Sides take turns, several rounds, because the
machine's speed drifts; a figure is the median over rounds of the ratio to `auto` of the same round.

    python benchmarks/demo_policies.py [--rounds 3] [--steps 6] [--work DIR]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from measure import prepare, run_policy, save

from lengthwise.session.demo_settings import NUM_RANKS, POLICIES

BATCH_SIZE = 4


def run_peer(work: Path, config: Path, steps: int, number: int) -> dict:
    """transformers' Trainer under torchrun: DDP, length grouping, dynamic padding, four sequences a rank."""
    out = work / f"trainer-{number}.json"
    script = Path(__file__).parent / "hf_trainer.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS),
        str(script), str(config), str(steps), str(BATCH_SIZE), str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/demo_policies"))
    options = parser.parse_args()
    config = prepare(options.work, options.steps)
    speeds: dict[str, list[float]] = {}
    others: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for policy in POLICIES:
            summary = run_policy(options.work, policy, number)
            speeds.setdefault(policy, []).append(summary.tokens_per_s)
            row = others.setdefault(policy, {"padding": [], "idle": []})
            row["padding"].append(summary.padding_fraction)
            row["idle"].append(summary.idle_fraction)
        peer = run_peer(options.work, config, options.steps, number)
        speeds.setdefault("transformers Trainer, group_by_length", []).append(peer["tokens"] / peer["seconds"])
        others.setdefault("transformers Trainer, group_by_length", {"padding": []})["padding"].append(peer["padding"])
    rows = {
        name: {
            "tokens_per_s": round(median(values)),
            "auto_is_faster_by": round(median(b / v for b, v in zip(speeds["auto"], values)), 2),
            **{key: round(median(shares), 3) for key, shares in others[name].items()},
        }
        for name, values in speeds.items()
    }
    save("demo_policies", {"rounds": options.rounds, "steps": options.steps, "ranks": NUM_RANKS, "sides": rows})


if __name__ == "__main__":
    main()
