"""How the time of preparing and planning grows with the devices of a cluster, under the policy ``auto``."""

from dataclasses import dataclass
from statistics import median
from time import process_time

import numpy as np
from pages import Goal, Section, number

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.search_space import SearchSpace, make_problem

MODEL, DEVICE, LONGEST = "llama-7b", "H100-80GB", 32_768
DEVICES = (1_024, 8_192, 16_384)
TOKENS_A_DEVICE = 3_125
SAMPLES = 32
PLANS = 4
CORES = 4
PREPARING_S, SHARE_OF_STEP = 20.0, 0.5
GOAL_AT = 8_192


def lengths(num_devices: int, *, seed: int) -> np.ndarray:
    """Lognormal lengths of a step, cut at 32K, of as many tokens as the default step of ``compare``."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(500), 1.2, TOKENS_A_DEVICE * num_devices // 400))
    clipped = np.clip(drawn, 16, LONGEST).astype(np.int64)
    return clipped[: np.searchsorted(np.cumsum(clipped), TOKENS_A_DEVICE * num_devices)]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Processor seconds of one core on one size of cluster."""

    preparing_s: float
    first_s: float
    """Of the first plan, which also prices the schemes that it uses."""
    plan_s: float
    """Of a plan: the median of those after the first."""
    step_s: float
    """Predicted seconds of these steps: the median."""


def measure(num_devices: int) -> Measured:
    """Prepare once and plan a few steps."""
    model, cluster = model_preset(MODEL), cluster_preset(f"{num_devices // 8}x8x{DEVICE}")
    problem = make_problem(
        AnalyticCost(model=model, cluster=cluster, dtype="bfloat16"),
        cluster=cluster,
        num_layers=model.num_layers,
        max_length=LONGEST,
        search_space=SearchSpace(),
        samples=[lengths(num_devices, seed=100 + sample) for sample in range(SAMPLES)],
    )
    start_s = process_time()
    prepare("auto", problem)
    preparing_s = process_time() - start_s
    planner, plans_s, steps_s = Planner(policy="auto", problem=problem), [], []
    for step in range(PLANS):
        drawn = lengths(num_devices, seed=1 + step).tolist()
        batch = GlobalBatch(step=step, ids=tuple(range(len(drawn))), lengths=tuple(drawn))
        start_s = process_time()
        plan = planner(batch)
        plans_s.append(process_time() - start_s)
        steps_s.append(plan.time_s)
    return Measured(preparing_s=preparing_s, first_s=plans_s[0], plan_s=median(plans_s[1:]), step_s=median(steps_s[1:]))


def scale(*, quick: bool) -> Section:
    """The table, and the goals for 8,192 devices."""
    sizes = DEVICES[:1] if quick else DEVICES
    measured = {size: measure(size) for size in sizes}
    rows = [
        (f"{size:,}", number(m.preparing_s, "s"), number(m.first_s, "s"), number(m.plan_s, "s"), number(m.step_s, "s"),
         f"{m.plan_s / m.step_s:.2f}", f"{m.plan_s / m.step_s / CORES:.2f}")
        for size, m in measured.items()
    ]  # fmt: skip
    goals: tuple[Goal, ...] = ()
    if GOAL_AT in measured:
        preparing_s, share = measured[GOAL_AT].preparing_s, measured[GOAL_AT].plan_s / measured[GOAL_AT].step_s / CORES
        goals = (
            Goal(what=f"preparing auto, {GOAL_AT:,} devices", aim=f"at most {PREPARING_S:.0f} s",
                 measured=number(preparing_s, "s"), met=preparing_s <= PREPARING_S),
            Goal(what=f"auto, a plan over its step, {GOAL_AT:,} devices, {CORES} cores", aim=f"at most {SHARE_OF_STEP}",
                 measured=f"{share:.2f}", met=share <= SHARE_OF_STEP),
        )  # fmt: skip
    return Section(
        title="Growth with the devices of a cluster",
        text=f"{MODEL} on {DEVICE} in nodes of 8, {TOKENS_A_DEVICE:,} tokens a device and step, lengths lognormal "
        f"around 500 tokens, cut at 32K. Processor seconds of one core; steps planned ahead by {CORES} workers take a "
        f"{CORES}th each. The first plan also prices the schemes that it uses; the others are medians of {PLANS - 1}.",
        head=("devices", "preparing", "first plan", "plan", "predicted step", "plan / step", f"with {CORES} cores"),
        rows=rows,
        goals=goals,
    )
