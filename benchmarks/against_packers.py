"""Packers of other projects, time-limited integer programs and optima for the micro-batches of one pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
import peers
from cells import CONTEXT_TOKENS, SHORT, Instance, corpus, published_candidates
from clock import timed
from exact import Optimum, Packing, cbc, highs, optima
from pages import Goal, Section, at_most, number
from published import Solver, pack

from lengthwise.plan.solve.shop import Machines, Objective, ShopSchedule, schedule
from lengthwise.plan.space.search_space import first_batches

OURS = "**ours**, with certificate"
SEED = 1
NAMES = {Objective.FLOW_SHOP: "flow shop", Objective.MAX_TIMES_COUNT: "Eq. (1)"}
SOLVER_LIMIT_S = 0.5
"""Of each integer program of the published code."""
FEW_SEQUENCES = 100
"""Integer programs are tried where a pipeline holds at most so many; beyond, they mostly find nothing in time."""

Batches = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One pipeline, and the sequences of some steps for it."""

    model: str
    place: tuple[int, int]
    """Degree and stages."""
    data: str
    tokens: int

    @property
    def name(self) -> str:
        """As tables show it."""
        degree, stages = self.place
        return f"{SHORT[self.model]}, <{degree},{stages}>, {self.data}, {self.tokens // 1000}K tokens"

    @property
    def machines(self) -> Machines:
        """What the scheduler knows of it."""
        kind = next(k for k in published_candidates(self.model, 64) if (k.scheme.degree, k.num_stages) == self.place)
        return Machines(
            count=1,
            stages=kind.num_stages,
            setup=kind.overhead_s,
            capacity=kind.max_tokens,
            min_fill=kind.cost.util_tokens(kind.scheme),
        )

    def instances(self, count: int) -> list[Instance]:
        """``count`` steps; sequences longer than a micro-batch are cut."""
        kind = next(k for k in published_candidates(self.model, 64) if (k.scheme.degree, k.num_stages) == self.place)
        longest = min(CONTEXT_TOKENS, kind.max_tokens)
        found = []
        for batch in first_batches(corpus(self.data), tokens_per_step=self.tokens, seed=SEED, steps=count):
            lengths = np.minimum(np.array(batch.lengths), longest)
            found.append(Instance(work=kind.times_s(lengths)[None, :], sizes=lengths, machines=(self.machines,)))
        return found


PIPELINES = (
    Pipeline(model="llama-7b", place=(2, 4), data="cc", tokens=50_000),
    Pipeline(model="llama-7b", place=(2, 2), data="cc", tokens=50_000),
    Pipeline(model="llama-32b", place=(8, 2), data="cc", tokens=50_000),
    Pipeline(model="llama-32b", place=(8, 4), data="cc", tokens=200_000),
    Pipeline(model="llama-7b", place=(4, 4), data="gh", tokens=200_000),
)


def packs(folder: Path | None, *, quick: bool) -> Section:
    """Sequences of one pipeline into micro-batches."""
    rows: list[tuple[str, ...]] = []
    wins: list[bool] = []
    for pipeline in PIPELINES[:2] if quick else PIPELINES:
        instances = pipeline.instances(4 if quick else 20)
        found = {objective: _ours(instances, objective) for objective in Objective}
        late = {o: _over_even(instances, [plan.batches[0] for plan, _ in held], o) for o, held in found.items()}
        plans = found[Objective.FLOW_SHOP]
        rows.append((pipeline.name, OURS, *_cells([t for _, t in plans], late, [plan.batches[0] for plan, _ in plans])))
        for peer in peers.packers(folder):
            packed = _packed(peer, instances)
            if isinstance(packed, str):
                rows.append((pipeline.name, peer.name, packed, "", "", ""))
                continue
            batches, times_s = packed
            theirs = {objective: _over_even(instances, batches, objective) for objective in Objective}
            wins += [late[objective] <= theirs[objective] for objective in Objective]
            rows.append((pipeline.name, peer.name, *_cells(times_s, theirs, batches)))
    return Section(
        title="Peers: micro-batches of one pipeline",
        text="The others fill as few packs as they can, or even out their work. Time of the pipeline over the time "
        "with perfectly even micro-batches of any number and one constant a stage "
        "(work + (stages - 1) longest sequence + stages c), under the flow shop and under Eq. (1); means. Ours is "
        "planned for each objective.",
        head=("pipeline", "packer", "time, median", "flow shop", "Eq. (1)", "micro-batches"),
        rows=rows,
        goals=(
            Goal(
                what="packing of a pipeline no slower than any peer's",
                aim="all pipelines and peers, both objectives",
                measured=f"{sum(wins)} of {len(wins)}",
                met=all(wins) if wins else None,
            ),
        ),
        after="As soon as a pipeline has stages, the fewest micro-batches are the wrong aim: the bubble is paid in "
        "units of the longest one.",
    )


def _ours(instances: Sequence[Instance], objective: Objective) -> list[tuple[ShopSchedule, float]]:
    return [timed(schedule, each.work, each.sizes, each.machines, objective=objective) for each in instances]


def _packed(peer: peers.Peer, instances: Sequence[Instance]) -> tuple[list[Batches], list[float]] | str:
    """Batches and seconds of every instance, or why there are none."""
    if peer.run is None:
        return f"not run: {peer.reason}"
    try:
        peer.run([3, 2, 1, 2, 3], 5)  # what is compiled or imported at the first call
        found = [timed(peer.run, each.sizes.tolist(), each.machines[0].capacity) for each in instances]
    except Exception as error:  # a peer that fails is a result
        return f"not run: {type(error).__name__}: {error}"
    for instance, (batches, _) in zip(instances, found):
        assert sorted(job for batch in batches for job in batch) == list(range(len(instance.sizes))), peer.name
        assert all(instance.sizes[list(batch)].sum() <= instance.machines[0].capacity for batch in batches), peer.name
    return [batches for batches, _ in found], [time_s for _, time_s in found]


def _over_even(instances: Sequence[Instance], packed: Sequence[Batches], objective: Objective) -> float:
    """Mean time over what even micro-batches would take, minus 1."""
    late = []
    for instance, batches in zip(instances, packed):
        work, machines = instance.work[0], instance.machines[0]
        even = float(work.sum() + (machines.stages - 1) * work.max() + machines.stages * machines.setup)
        late.append(span(work, batches, machines, objective) / even - 1)
    return fmean(late)


def span(work: np.ndarray, batches: Batches, machines: Machines, objective: Objective) -> float:
    """Time of a pipeline."""
    times = [float(work[list(batch)].sum()) + machines.setup for batch in batches if len(batch)]
    if objective is Objective.FLOW_SHOP:
        return sum(times) + (machines.stages - 1) * max(times)
    return max(times) * (machines.stages - 1 + len(times))


def _cells(times_s: list[float], late: dict[Objective, float], batches: Sequence[Batches]) -> tuple[str, ...]:
    return (
        number(median(times_s), "ms"),
        *(f"+{number(late[objective], '%')}" for objective in NAMES),
        f"{fmean(len(held) for held in batches):.1f}",
    )


def optimum(folder: Path | None, *, quick: bool) -> Section:
    """Our packing, and time-limited integer programs, over the best that CP-SAT finds."""
    limit_s, count = (1.0, 1) if quick else (3.0, 3)
    rows: list[tuple[str, ...]] = []
    over: list[float] = []
    program_limit_s = SOLVER_LIMIT_S / 10 if quick else SOLVER_LIMIT_S
    solvers = _solvers(folder, limit_s=program_limit_s)
    for pipeline in PIPELINES[:1] if quick else PIPELINES:
        instances = pipeline.instances(count)
        for objective, name in NAMES.items():
            found = _ours(instances, objective)
            best = _best(folder, instances, found, objective, limit_s)
            if isinstance(best, str):
                rows.append((pipeline.name, name, best, *[""] * (4 + len(solvers))))
                continue
            late = [plan.makespan / one.span - 1 for (plan, _), one in zip(found, best)]
            over += late
            programs = solvers if objective is Objective.MAX_TIMES_COUNT else dict.fromkeys(solvers)
            rows.append(
                (
                    pipeline.name,
                    name,
                    number(median(time_s for _, time_s in found), "ms"),
                    f"+{number(fmean(late), '%')}",
                    f"+{number(max(late), '%')}",
                    f"{sum(one.is_proven for one in best)} of {len(best)}",
                    number(fmean(one.span / one.bound - 1 for one in best), "%"),
                    *(_program(solver, instances[:2], best) for solver in programs.values()),
                )
            )
    return Section(
        title="Packing of one pipeline over the best that CP-SAT finds",
        text=f"{peers.version(folder, 'ortools')}, {limit_s:.0f} s a pipeline, two workers, started from our packing, "
        "all numbers of micro-batches that could be better; *open*: from its solution to its bound, mean. The solver "
        f"columns are Eq. (1) as published (at most 16 integer programs, {program_limit_s} s each): distance from "
        "the best and time of one pipeline.",
        head=("pipeline", "objective", "ours: time", "over best", "worst", "proven", "open", *solvers),
        rows=rows,
        goals=(
            at_most("packing over the best CP-SAT finds, mean", fmean(over) if over else None, 0.005, "%"),
            at_most("packing over the best CP-SAT finds, worst", max(over, default=None), 0.02, "%"),
        ),
    )


def _solvers(folder: Path | None, *, limit_s: float) -> dict[str, Solver | None]:
    try:
        return {"HiGHS": highs(limit_s), "CBC": cbc(peers.package(folder, "pulp"), limit_s)}
    except RuntimeError:
        return {"HiGHS": highs(limit_s), "CBC": None}


def _best(
    folder: Path | None,
    instances: Sequence[Instance],
    found: Sequence[tuple[ShopSchedule, float]],
    objective: Objective,
    limit_s: float,
) -> list[Optimum] | str:
    """What CP-SAT makes of every instance, or why it did not run."""
    if folder is None:
        return "not run: no folder of peers given (--peers)"
    packings = [
        Packing.of(each.work[0], each.sizes, each.machines[0], objective, plan)
        for each, (plan, _) in zip(instances, found)
    ]
    try:
        return optima(packings, peers=folder, limit_s=limit_s)
    except RuntimeError as error:
        return f"not run: {error}"


def _program(solver: Solver | None, instances: Sequence[Instance], best: Sequence[Optimum]) -> str:
    """Distance from the best and seconds of the published packing with a solver."""
    small = [(each, one) for each, one in zip(instances, best) if len(each.sizes) <= FEW_SEQUENCES]
    if solver is None or not small:
        return ""
    late, times_s, solved = [], [], 0
    for instance, one in small:
        work, machines = instance.work[0], instance.machines[0]
        (batches, found), time_s = timed(pack, work, instance.sizes, machines, solver)
        late.append(span(work, batches, machines, Objective.MAX_TIMES_COUNT) / one.span - 1)
        times_s.append(time_s)
        solved += found
    missing = f", {len(small) - solved} of {len(small)} unsolved" if solved < len(small) else ""
    return f"+{number(fmean(late), '%')}, {number(median(times_s), 'ms')}{missing}"
