"""Balancers of other projects on the same inputs: sequences onto equal pipelines; Megatron-Core's scheduler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import peers
from cells import SHORT, TOKENS_PER_DEVICE, Cell, Instance, corpus
from clock import timed
from pages import Goal, Section, number
from published import dispatch

from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.shop import ShopSchedule, schedule
from lengthwise.plan.space.search_space import first_batches

SETTINGS = (
    ("llama-32b", 64, "cc", "4 x <16,1>"),
    ("llama-7b", 64, "cc", "16 x <4,1>"),
    ("llama-32b", 1024, "cc", "64 x <16,1>"),
    ("llama-32b", 1024, "gh", "64 x <16,1>"),
)
HYBRID = ((64, "cc"), (64, "gh"), (1024, "cc"), (1024, "gh"))
HYBRID_TOKENS = 4096
"""Tokens a rank holds in Megatron-Core's scheduler."""
UNITS_PER_S = 1_000_000
"""Peers take whole numbers: microseconds."""
SLOW_S = 0.2
"""A peer slower than this is run on ``FEW`` batches."""
FEW = 2
EQUAL = 5e-4
"""Relative: what ours stops at, ``Effort.tolerance``."""
OURS = "**ours**, with packing and certificate"
ALGORITHM_1 = "Hydraulis Algorithm 1, 100 shuffles (our writing in NumPy)"

Balance = Callable[[Instance], list[list[int]]]
"""From an instance with one type of machine to the jobs of each machine."""


@dataclass(kw_only=True)
class Tried:
    """What one balancer made of some batches."""

    times_s: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    """Heaviest part over what no split can be below, minus 1."""
    over_bound: list[float] = field(default_factory=list)
    """Time of the step over our proven bound, minus 1."""

    def add(self, instance: Instance, parts: Sequence[Sequence[int]], *, time_s: float, bound: float) -> None:
        """Measure one split; its parts are packed first-fit decreasing."""
        work, machines = instance.work[0], instance.machines[0]
        assert sorted(at for part in parts for at in part) == list(range(len(work))), "a sequence is lost or doubled"
        loads = [float(work[list(part)].sum()) for part in parts if len(part)]
        packs = [
            len(first_fit_decreasing(instance.sizes[list(part)].tolist(), machines.capacity))
            for part in parts
            if len(part)
        ]
        self.times_s.append(time_s)
        self.imbalance.append(max(loads) / max(float(work.sum()) / machines.count, float(work.max())) - 1)
        self.over_bound.append(max(load + machines.setup * count for load, count in zip(loads, packs)) / bound - 1)

    def cells(self) -> tuple[str, str, str]:
        """As the table shows it."""
        imbalance, late = fmean(self.imbalance), fmean(self.over_bound)
        return number(median(self.times_s), "ms"), number(imbalance, "%"), f"+{number(late, '%')}"


def splits(folder: Path | None, *, quick: bool) -> Section:
    """Sequences onto equal pipelines of one stage."""
    rows: list[tuple[str, ...]] = []
    best: list[bool] = []
    for model, num_devices, data, words in SETTINGS[:2] if quick else SETTINGS:
        cell = Cell(model=model, num_devices=num_devices, data=data)
        strategy = cell.strategy(words)
        instances = [Instance.of(strategy, cell.priced(batch)) for batch in cell.batches(3 if quick else 10)]
        setting = f"{SHORT[model]}, {num_devices:,} GPUs, {data}, {words}"
        found = [timed(schedule, each.work, each.sizes, each.machines) for each in instances]
        bounds = [plan.lower_bound for plan, _ in found]
        ours = Tried()
        for instance, (plan, time_s), bound in zip(instances, found, bounds):
            ours.add(instance, _parts(plan), time_s=time_s, bound=bound)
        late = fmean(plan.makespan / plan.lower_bound - 1 for plan, _ in found)
        ours.over_bound = [late]
        rows.append((setting, OURS, *ours.cells()))
        others = []
        for name, tried in _peers(folder, instances, bounds):
            rows.append((setting, name, *(tried.cells() if isinstance(tried, Tried) else (tried, "", ""))))
            others += [fmean(tried.over_bound)] if isinstance(tried, Tried) else []
        best.append(late <= min(others) + EQUAL)
    return Section(
        title="Peers: sequences onto equal pipelines",
        text="The others know neither stages nor types of pipeline nor what a micro-batch holds, so they are compared "
        "where all pipelines are equal and have one stage. They balance our predicted work (whole microseconds); "
        "their parts are then packed first-fit decreasing, and every micro-batch pays its constant. *Imbalance*: "
        "heaviest part over the larger of mean and longest sequence. *Step*: slowest pipeline over our proven bound.",
        head=("setting", "balancer", "time, median", "work imbalance", "step over bound"),
        rows=rows,
        goals=(
            Goal(
                what=f"step on equal pipelines no slower than with any other balance (within {EQUAL:.2%})",
                aim="all settings",
                measured=f"{sum(best)} of {len(best)}",
                met=all(best),
            ),
        ),
        after="Balancing work alone is solved by any differencing or longest-first method. What is left is the "
        "constant of every micro-batch: a part that just exceeds what a micro-batch holds pays it once more.",
    )


def _parts(plan: ShopSchedule) -> list[list[int]]:
    return [[job for batch in batches for job in batch] for batches in plan.batches]


def _peers(
    folder: Path | None, instances: Sequence[Instance], bounds: Sequence[float]
) -> list[tuple[str, Tried | str]]:
    """Every other balancer and what it came to, or why it did not run."""
    found: list[tuple[str, Tried | str]] = []
    for peer in peers.splitters(folder):
        if peer.run is None:
            found.append((peer.name, f"not run: {peer.reason}"))
            continue
        try:
            peer.run([4, 3, 2, 1], 2)  # what is compiled or imported at the first call
            found.append((peer.name, _try(_in_units(peer.run), instances, bounds)))
        except Exception as error:  # a peer that fails is a result
            found.append((peer.name, f"not run: {type(error).__name__}: {error}"))
    return [*found, (ALGORITHM_1, _try(dispatch, instances, bounds))]


def _in_units(run: Callable[[list[int], int], list[list[int]]]) -> Balance:
    def balance(instance: Instance) -> list[list[int]]:
        return run(np.rint(instance.work[0] * UNITS_PER_S).astype(int).tolist(), instance.machines[0].count)

    return balance


def _try(balance: Balance, instances: Sequence[Instance], bounds: Sequence[float]) -> Tried:
    tried = Tried()
    for instance, bound in zip(instances, bounds):
        if len(tried.times_s) >= FEW and median(tried.times_s) > SLOW_S:
            break
        parts, time_s = timed(balance, instance)
        tried.add(instance, parts, time_s=time_s, bound=bound)
    return tried


def hybrid(folder: Path | None, *, quick: bool) -> Section:
    """Megatron-Core's scheduler of hybrid context parallelism: what it takes and how even it is by its own measure."""
    peer = peers.megatron(folder)
    rows: list[tuple[str, ...]] = []
    for num_devices, data in HYBRID[:2] if quick else HYBRID:
        budget = num_devices * TOKENS_PER_DEVICE
        batches = first_batches(corpus(data), tokens_per_step=budget, seed=0, steps=2 if quick else 4)
        setting = f"{num_devices:,} GPUs, {data}"
        if peer.run is None:
            rows.append((setting, f"not run: {peer.reason}", "", ""))
            continue
        try:
            found = [timed(peer.run, list(batch.lengths), num_devices, HYBRID_TOKENS) for batch in batches]
            rows.append((setting, *_hybrid_cells(found, num_devices)))
        except Exception as error:  # a peer that fails is a result
            rows.append((setting, f"not run: {type(error).__name__}: {error}", "", ""))
    return Section(
        title="Peers: Megatron-Core's hybrid context parallelism",
        text=f"A different problem: a degree of context parallelism per sequence, {HYBRID_TOKENS:,} tokens a rank, "
        "work counted as length squared over degree, no limit on what a rank holds in all, no stages. So only its time "
        "and its own measure of idleness are told. (`DpBalancedScheduler` is not in this release.)",
        head=("setting", "time, median", "groups", "idle by its own measure"),
        rows=rows,
    )


def _hybrid_cells(found: Sequence[tuple[Any, float]], num_devices: int) -> tuple[str, ...]:
    idle = fmean(1 - sum(map(sum, groups)) / num_devices / sum(max(group) for group in groups) for groups, _ in found)
    count = fmean(len(groups) for groups, _ in found)
    return number(median(time_s for _, time_s in found), "ms"), f"{count:.1f}", number(idle, "%")
