"""Whether `auto` is at least 0.99x the best policy on measured runs: paired repeats, with confidence intervals.

    python benchmarks/auto_repeats.py [--repeats 20] [--only demo any-model] [--ranks 2] [--work DIR]

Corpora of the demo (its own lengths, and those of other benchmarks), and three models with three sets of lengths each.
All policies take turns in every repeat, in reversed order in every other one. A ratio is `auto`'s tokens per second
over another policy's of the same repeat; the geometric mean has a 95 % interval of Student's t. A policy that `auto` is
certainly more than 1.05x after five repeats is not run again. The machine must be idle: with a load average of 1.5 or
more nothing is started without --busy. Two hours on two cores; what was measured is kept in --work after every repeat,
so that the script goes on where it was stopped. Writes results/auto_repeats.json.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from any_model_runs import KINDS, POWERS, memory_gib, train
from measure import profile_again, run_policy, save
from method_ranks import Ranks
from scipy.stats import t as students_t

from lengthwise.cli.commands import index
from lengthwise.session.demo_settings import DEMO_LENGTHS, POLICIES, demo_config

AIM, CONFIDENCE, MOST_LOAD = 0.99, 0.95, 1.5
FIRST_REPEATS, FAR_AHEAD = 5, 1.05
"""After how many repeats a policy is dropped that `auto` is at least so far ahead of."""
SIDES = ("bucket", "static", "dcp-inter", "dcp-intra", "auto")
CORPORA = {"demo": DEMO_LENGTHS, "demo, 4,096 tokens": {}}
"""Lengths and steps of the demo's corpus."""
Speeds = Mapping[str, Sequence[float]]


def ratio_of(auto: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the ratios of paired repeats, and the ends of its confidence interval."""
    logs = np.log(np.asarray(auto[: len(other)]) / np.asarray(other))
    half = 0.0
    if len(logs) > 1:
        half = students_t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    low, middle, high = map(float, np.exp(logs.mean() + np.array([-half, 0.0, half])))
    return middle, low, high


def in_turns(sides: Sequence[str], repeats: int, speed_of: Callable[[str, int], float], kept: Path) -> Speeds:
    """Speeds of all sides in every repeat, in reversed order in every other one; those in the file ``kept`` count."""
    speeds: dict[str, list[float]] = json.loads(kept.read_text()) if kept.exists() else {side: [] for side in sides}
    for number in range(len(speeds["auto"]), repeats):
        close = [side for side in sides if side == "auto" or number < FIRST_REPEATS or _is_close(speeds, side)]
        for side in close[:: -1 if number % 2 else 1]:
            speeds[side].append(speed_of(side, number))
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(speeds))
    return speeds


def _is_close(speeds: Speeds, side: str) -> bool:
    return ratio_of(speeds["auto"][:FIRST_REPEATS], speeds[side][:FIRST_REPEATS])[1] < FAR_AHEAD


def on_demo(lengths: dict[str, int], repeats: int, steps: int, work: Path) -> Speeds:
    """Runs of the demo's corpus and model on two ranks."""
    if not (work / "profile.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        index.run(out=work / "index", python_stdlib=True, train_bpe=8192)
        demo_config(work / "index", work / "profile.json", steps, **lengths).save(work / "config.yaml")
        profile_again(work)
    return in_turns(
        POLICIES, repeats, lambda policy, number: run_policy(work, policy, number).tokens_per_s, work / "speeds.json"
    )


def table_of(name: str, speeds: Speeds) -> dict[str, object]:
    """Print and return what a set of runs says."""
    ratios = {side: ratio_of(speeds["auto"], speeds[side]) for side in speeds if side != "auto"}
    best = min(ratios, key=lambda side: ratios[side][0])
    middle, low, high = ratios[best]
    verdict = "met" if low >= AIM else "missed" if high < AIM else "not decided"
    sys.stdout.write(f"{name}: auto {middle:.3f}x of {best} ({low:.3f} to {high:.3f}), at least {AIM}x: {verdict}\n")
    sys.stdout.flush()
    return {"runs": name, "best": best, "verdict": verdict, "ratios": ratios, "tokens_per_s": dict(speeds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=("demo", "any-model"), default=["demo", "any-model"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="on a machine that does other work too")
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/auto_repeats"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    loads = [os.getloadavg()[0]]
    if loads[0] >= MOST_LOAD and not options.busy:
        sys.exit(
            f"the load average is {loads[0]:.1f}; ratios of an idle machine need less than {MOST_LOAD}. See --busy"
        )
    tables = []
    if "demo" in options.only:
        for name, lengths in CORPORA.items():
            work = options.work / name.replace(" ", "-").replace(",", "")
            tables.append(table_of(name, on_demo(lengths, options.repeats, options.steps, work)))
    if "any-model" in options.only:
        ranks = Ranks(options.ranks)
        with tempfile.TemporaryDirectory() as work:
            for kind in KINDS:
                limit = ranks.run(memory_gib, kind, work)[0]
                for drawn in POWERS:

                    def speed_of(side: str, number: int, kind: str = kind, drawn: str = drawn) -> float:
                        result = ranks.run(train, kind, drawn, side, options.steps, limit, work)[0]  # noqa: B023
                        return float(result["tokens_per_s"])

                    kept = options.work / f"{kind.split()[0]}-{drawn}.json"
                    tables.append(table_of(f"{kind}, {drawn}", in_turns(SIDES, options.repeats, speed_of, kept)))
        ranks.close()
    loads.append(os.getloadavg()[0])
    save("auto_repeats", {"repeats": options.repeats, "steps": options.steps, "load": loads, "runs": tables})


if __name__ == "__main__":
    main()
