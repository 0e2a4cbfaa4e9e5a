"""How fast and how good planning is: beside bounds, exact solvers, the published planner and other projects' packers.

    pip install --no-deps --target DIR -r benchmarks/peers.txt
    python benchmarks/planning.py --peers DIR [--quick] [--only pipeline,optimum [--rewrite]]

Everything runs on one core, in one run, on the same inputs. Peers that cannot be loaded are reported as not run.
Writes planning.md and results/planning.json.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import against_packers
import against_peers
import against_published
import plan_cells
import plan_growth
import plan_optimum
import plan_proposals
import plan_scale
from pages import Section, on_one_core, rewrite, say, write

from lengthwise.plan.solve.shop import Objective

TITLE = "Planning: time and quality"
FIRST = (
    "Measured planning times and planned (not executed) step times. Costs are the A800 fits that Hydraulis published; "
    "lengths are synthetic: *cc* is like CommonCrawl, *gh* like GitHub code, both cut at 32K. 200K tokens a step on 64 "
    "GPUs, 3.2M on 1,024. One core for everything, NumPy without compiled code of ours."
)

Make = Callable[[], Section]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings, steps and seconds; for a look")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with the packages of peers.txt")
    parser.add_argument("--only", default="", metavar="A,B", help="only these sections; writes no page")
    parser.add_argument("--rewrite", action="store_true", help="with --only: write these sections into the page")
    options = parser.parse_args()
    on_one_core()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # small instances are those of tests
    parts = makers(options.peers, quick=options.quick)
    wanted = options.only.split(",") if options.only else list(parts)
    if unknown := set(wanted) - set(parts):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    sections = [say(parts[name]()) for name in wanted]
    if options.only and options.rewrite:
        rewrite("planning", sections)
    elif not options.only:
        write("planning", title=TITLE, first=FIRST + (" **A quick run.**" if options.quick else ""), sections=sections)


def makers(folder: Path | None, *, quick: bool) -> dict[str, Make]:
    """Sections by name, in the order of the page."""
    return {
        "cells": lambda: plan_cells.time_and_gap(Objective.FLOW_SHOP, quick=quick),
        "eq1": lambda: plan_cells.time_and_gap(Objective.MAX_TIMES_COUNT, quick=quick),
        "choice": lambda: plan_cells.choice(quick=quick),
        "pipeline": lambda: against_published.pipeline(folder, quick=quick),
        "optimum": lambda: against_packers.optimum(folder, quick=quick),
        "growth": lambda: plan_growth.growth(quick=quick),
        "scale": lambda: plan_scale.scale(quick=quick),
        "policies": lambda: plan_optimum.policies(quick=quick),
        "assignments": lambda: plan_optimum.assignments(quick=quick),
        "splits": lambda: against_peers.splits(folder, quick=quick),
        "packs": lambda: against_packers.packs(folder, quick=quick),
        "hybrid": lambda: against_peers.hybrid(folder, quick=quick),
        "propose": lambda: plan_proposals.times(quick=quick),
        "held-out": lambda: plan_proposals.held_out(quick=quick),
    }


if __name__ == "__main__":
    main()
