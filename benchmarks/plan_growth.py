"""How the time of planning grows with the sequences of a step, for every policy."""

from dataclasses import dataclass
from time import process_time

import numpy as np
from pages import Goal, Section, number

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import POLICIES, prepare
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, make_problem

MODEL, CLUSTER, LONGEST = "llama-7b", "8x8xH100-80GB", 32_768
SIZES = (10_000, 100_000, 1_000_000)
SAMPLES = 8
LIMIT_S = 30.0
"""Of one step of a million sequences."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One policy on a step of one size, in seconds of one core."""

    preparing_s: float
    planning_s: float
    gap: float


def lengths(count: int, *, seed: int) -> np.ndarray:
    """Lognormal lengths around 500 tokens, cut at 32K."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(500), 1.0, count))
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def problem_of(count: int) -> PlanningProblem:
    """64 GPUs, and samples of steps of as many sequences."""
    model, cluster = model_preset(MODEL), cluster_preset(CLUSTER)
    return make_problem(
        AnalyticCost(model=model, cluster=cluster, dtype="bfloat16"),
        cluster=cluster,
        num_layers=model.num_layers,
        max_length=LONGEST,
        search_space=SearchSpace(),
        samples=[lengths(count, seed=100 + sample) for sample in range(SAMPLES)],
    )


def measure(policy: str, problem: PlanningProblem, batch: GlobalBatch) -> Measured:
    """Prepare and plan one step, as if no other policy had planned it."""
    start_s = process_time()
    prepare(policy, problem)
    ready_s = process_time()
    plan = Planner(policy=policy, problem=problem).plan(PricedBatch(problem, batch))
    return Measured(preparing_s=ready_s - start_s, planning_s=process_time() - ready_s, gap=plan.gap)


def growth(*, quick: bool) -> Section:
    """The table, and the goal for a million sequences."""
    sizes = SIZES[:-1] if quick else SIZES
    found: dict[tuple[str, int], Measured] = {}
    for size in sizes:
        problem = problem_of(size)
        drawn = lengths(size, seed=0).tolist()
        batch = GlobalBatch(step=0, ids=tuple(range(size)), lengths=tuple(drawn))
        for policy in POLICIES:
            found[policy, size] = measure(policy, problem, batch)
    head = tuple(f"{what}, {size:,}" for size in sizes for what in ("plan", "gap"))
    rows = [
        (
            policy,
            *(
                cell
                for size in sizes
                for cell in (number(found[policy, size].planning_s, "s"), f"{found[policy, size].gap:.2%}")
            ),
        )
        for policy in POLICIES
    ]
    slowest = found["auto", sizes[-1]].planning_s
    goals = () if quick else (
        Goal(
            what=f"auto, one step of {sizes[-1]:,} sequences on 64 GPUs",
            aim=f"at most {LIMIT_S:.0f} s",
            measured=number(slowest, "s"),
            met=slowest <= LIMIT_S,
        ),
    )  # fmt: skip
    preparing = ", ".join(f"{number(found['auto', size].preparing_s, 's')} at {size:,}" for size in sizes)
    return Section(
        title="Growth with the sequences of a step",
        text=f"{MODEL} on {CLUSTER}, lengths lognormal around 500 tokens, cut at 32K. Seconds of one core (processor "
        "time, so that other work on the machine hardly counts) from lengths to a checked plan.",
        head=("policy", *head),
        rows=rows,
        goals=goals,
        after=f"Preparing `auto`, every other policy being ready: {preparing}.",
    )
