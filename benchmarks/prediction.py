"""Predicted against measured step time of `auto` on the demo's corpus: the median absolute error over the steps.

The profile is measured in the same run, once before and once after the steps; the error is given against the first
(what a user has), and the drift of the machine between the two says how much of it is the machine's.

    python benchmarks/prediction.py [--steps 51] [--work DIR]
"""

import argparse
from pathlib import Path
from statistics import median

from measure import prepare, profile_again, run_policy, save

from lengthwise.core.cost import ProfileTable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/prediction"))
    options = parser.parse_args()
    prepare(options.work, options.steps)
    before = ProfileTable.load(options.work / "profile.json")
    summary = run_policy(options.work, "auto", 0)
    profile_again(options.work)
    after = ProfileTable.load(options.work / "profile.json")
    errors = [step.prediction_error for step in summary.timed]
    save(
        "prediction",
        {
            "steps": len(errors),
            "median_absolute_error": round(median(map(abs, errors)), 4),
            "median_error": round(median(errors), 4),
            "worst_absolute_error": round(max(map(abs, errors)), 4),
            "machine_drift": round(median(b.time_s / a.time_s for a, b in zip(before.rows, after.rows)) - 1, 4),
            "median_gap_to_bound": round(summary.gap, 5),
            "idle": round(summary.idle_fraction, 4),
        },
    )


if __name__ == "__main__":
    main()
