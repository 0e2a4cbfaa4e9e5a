"""Plans and assignments of small instances beside the best of all, which are tried out."""

from statistics import fmean

import numpy as np
from pages import Goal, Section, at_most, number

from lengthwise.plan.solve.shop import Objective

CASES = {"hydraulis": 250, "dcp-intra": 250, "auto": 250}
"""Cases of each policy; those whose candidates hold not every sequence are left out."""
MEAN_ABOVE = {"hydraulis": 0.02, "dcp-intra": 0.02, "auto": 0.005}
WORST_ABOVE = 0.05
NOT_TUNED_ON = 500
"""The first of the cases that nothing was mended by."""
INSTANCES, ASSIGNED_ABOVE = 10_000, 0.03
"""Instances of each objective."""
JOBS = ((2, 8), (9, 9))

Row = tuple[str | int, ...]


def policies(*, quick: bool) -> Section:
    """Every policy within its own space."""
    from tests.plan.test_against_brute_force import SPACES, planned

    rows: list[Row] = []
    goals: list[Goal] = []
    for name, count in CASES.items():
        candidates_of, options, _ = SPACES[name]
        for first in (0, NOT_TUNED_ON):
            seeds = range(first, first + (20 if quick else count))
            results = [planned(name, seed, candidates_of, **options) for seed in seeds]
            above = np.array([plan.time_s / best_s - 1 for plan, best_s in filter(None, results)])
            broken = sum(bool(plan.lower_bound_s > best_s * (1 + 1e-9)) for plan, best_s in filter(None, results))
            seen = "tuned on" if first == 0 else "others"
            rows.append(
                (name, seen, len(above), number(float(above.mean()), "%"), number(float(above.max()), "%"),
                 int((above > 0.02).sum()), int((above < 1e-9).sum()), broken)
            )  # fmt: skip
            mean, worst = float(above.mean()), float(above.max())
            goals.append(
                Goal(
                    what=f"{name} above the optimum of its space, {seen}, mean and worst",
                    aim=f"at most {number(MEAN_ABOVE[name], '%')}, {number(WORST_ABOVE, '%')}",
                    measured=f"{number(mean, '%')}, {number(worst, '%')}",
                    met=mean <= MEAN_ABOVE[name] and worst <= WORST_ABOVE,
                )
            )
            goals.append(
                Goal(
                    what=f"bounds of {name} above that optimum, {seen}",
                    aim="none",
                    measured=str(broken),
                    met=not broken,
                )
            )
    return Section(
        title="Policies beside the optimum of their own space",
        text="Random problems of 2 to 4 devices, up to 2 stages, no recompute or up to 4 layers of 4, 2 to 5 "
        "sequences; coefficients a, b, c, communication, memory and update drawn. The optimum is over every "
        "strategy, every dispatch and every packing, in one phase, of `dcp-intra` and `auto` also in two; under "
        "`auto` devices may be idle, and layers mixed. Seconds above it are of whole steps. *Tuned on*: planners were "
        "mended by these cases.",
        head=(
            "policy",
            "cases",
            "number",
            "mean above",
            "worst above",
            "over 2 %",
            "optimal",
            "bounds above the optimum",
        ),
        rows=rows,
        goals=tuple(goals),
    )


def assignments(*, quick: bool) -> Section:
    """Assignment and packing of few jobs on machines of several types."""
    from tests.plan.shop.test_small_instances import ratios

    rows: list[Row] = []
    goals: list[Goal] = []
    for jobs in JOBS:
        count = 50 if quick else INSTANCES if jobs[1] < 9 else INSTANCES // 100
        over: dict[Objective, list[float]] = ratios(np.random.default_rng(25), count, *jobs)
        for objective, values in over.items():
            above = [float(value) - 1 for value in values]
            words = "flow shop" if objective is Objective.FLOW_SHOP else "Eq. (1)"
            rows.append(
                (f"{jobs[0]} to {jobs[1]}" if jobs[0] < jobs[1] else jobs[0], words, len(above),
                 number(fmean(above), "%"), number(max(above), "%"), sum(value > 1e-9 for value in above))
            )  # fmt: skip
            if objective is Objective.FLOW_SHOP:
                goals.append(
                    at_most(f"assignment of {jobs[0]} to {jobs[1]} jobs above the best schedule, flow shop, worst",
                            max(above), ASSIGNED_ABOVE, "%")
                )  # fmt: skip
    return Section(
        title="Assignment beside all schedules of a few jobs",
        text="Up to four machines of up to three types, 1, 2 or 4 stages, a constant for each batch, for each job, or "
        "none; least tokens of a batch, and long jobs over the capacity. The best schedule is searched exhaustively, "
        "by a search that a test compares with the definition.",
        head=("jobs", "objective", "instances", "mean above", "worst above", "above the best"),
        rows=rows,
        goals=tuple(goals),
        after="To eight jobs all schedules are searched; beyond, what exchanges leave is settled for the slowest "
        "machine and one other.",
    )
