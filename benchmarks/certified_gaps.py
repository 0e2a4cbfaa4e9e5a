"""How near plans of `auto` are to what no plan of one phase or two beats, in the settings of compare_policies.

    python benchmarks/certified_gaps.py [--steps N] [--only llama-7b,dcp-long]

Prints, for each step, the gap to the bound that plans come with, which takes milliseconds, and to the bound of
``lengthwise.plan.bounds.phase_cover``, which takes minutes. Nothing is trained.
"""

import argparse
import sys
from statistics import median
from time import process_time

from compare_policies import GPUS, cells
from contests import setting
from pages import on_one_core

from lengthwise.plan.auto import AutoPolicy
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="global batches of each setting")
    parser.add_argument("--only", default="", metavar="A,B", help="only settings of these models and lengths")
    options = parser.parse_args()
    on_one_core()
    wanted = set(options.only.split(",")) if options.only else set()
    for model, lengths in cells(quick=False):
        if wanted and not {model, lengths} & wanted:
            continue
        quick, certified, planning_s = gaps(model, lengths, options.steps)
        sys.stdout.write(
            f"{model}, {lengths}: median gap {median(quick):.1%}, certified {median(certified):.1%} "
            f"({', '.join(f'{gap:.1%}' for gap in certified)}), {planning_s:.0f} s a step\n"
        )
        sys.stdout.flush()


def gaps(model: str, lengths: str, steps: int) -> tuple[list[float], list[float], float]:
    """Gaps of each step to either bound, and CPU seconds that the second one takes."""
    comparison, entry = setting(model, lengths, gpus=GPUS, steps=steps)
    assert entry.problem is not None, entry.refused
    policy = prepare("auto", entry.problem)
    assert isinstance(policy, AutoPolicy)
    quick, certified, begun_s = [], [], 0.0
    for batch in comparison.batches(entry):
        priced = PricedBatch(entry.problem, batch)
        draft = policy(priced)
        planned_s = time_s(priced, draft)
        quick.append(planned_s / draft.lower_bound_s - 1)
        begun_s -= process_time()
        certified.append(planned_s / policy.certified_s(priced, draft) - 1)
        begun_s += process_time()
    return quick, certified, begun_s / steps


if __name__ == "__main__":
    main()
