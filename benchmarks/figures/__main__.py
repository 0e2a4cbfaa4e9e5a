"""Draw the figures of the published systems from our planner and simulator: docs/images/papers/ and docs/papers.md.

    python benchmarks/figures [--only hydraulis-3,dcp-5] [--check]

Nothing is trained and no device is needed: what is drawn is planned or simulated, on one core.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import dcp_settings
import dcp_throughput
import hydraulis_ablation
import hydraulis_choice
import hydraulis_dispatch
import hydraulis_lengths
import hydraulis_packing
import hydraulis_scaling
import hydraulis_schemes
import hydraulis_sensitivity
import paradyse_algorithm
import paradyse_curves
import paradyse_forest
import paradyse_smoothing
from pages import on_one_core
from paper_page import written

FIGURES = {
    "dcp-4": dcp_throughput.imbalance,
    "dcp-5": dcp_settings.communication,
    "dcp-8": dcp_throughput.throughput,
    "dcp-9": dcp_throughput.weak_scaling,
    "dcp-10": dcp_settings.recompute,
    "hydraulis-1": hydraulis_schemes.attention,
    "hydraulis-3": hydraulis_lengths.fluctuation,
    "hydraulis-4": hydraulis_schemes.trade_offs,
    "hydraulis-5": hydraulis_packing.pack_contents,
    "hydraulis-10": hydraulis_sensitivity.gains,
    "hydraulis-11": hydraulis_scaling.scaling,
    "hydraulis-12a": hydraulis_choice.chosen_strategies,
    "hydraulis-12b": hydraulis_choice.balance,
    "hydraulis-13": hydraulis_ablation.throughput,
    "hydraulis-14": hydraulis_lengths.longest_of_large_steps,
    "hydraulis-15": hydraulis_packing.fluctuation_of_time,
    "hydraulis-16a": hydraulis_schemes.efficiency,
    "hydraulis-17": hydraulis_dispatch.greedy_over_ideal,
    "paradyse-2": paradyse_curves.cumulative_times,
    "paradyse-algorithm-1": paradyse_algorithm.excess,
    "paradyse-forest": paradyse_forest.importance,
    "paradyse-smoothing": paradyse_smoothing.sensitivity,
}
"""Figures by name, in the order in which they are drawn."""


def main() -> None:
    """Draw what is asked for; with ``--check``, name the files that say something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="A,B", help="only these figures")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file has other numbers")
    options = parser.parse_args()
    on_one_core()
    wanted = options.only.split(",") if options.only else list(FIGURES)
    if unknown := set(wanted) - set(FIGURES):
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    files = written({name: FIGURES[name]() for name in wanted})
    if options.check:
        stale = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
        sys.exit(f"stale: {', '.join(stale)}; draw them again with: python benchmarks/figures" if stale else 0)
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
