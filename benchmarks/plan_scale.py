"""How the time of preparing and planning grows with the devices of a cluster, under the policy ``auto``."""

from time import process_time

import numpy as np
from pages import Goal, Section, number

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, make_problem

MODEL, DEVICE, LONGEST = "llama-7b", "H100-80GB", 32_768
DEVICES = (1_024, 8_192, 16_384)
TOKENS_A_DEVICE = 3_125
SAMPLES = 32
CORES = 4
PREPARING_S, SHARE_OF_STEP = 20.0, 0.5
GOAL_AT = 8_192


def lengths(num_devices: int, *, seed: int) -> np.ndarray:
    """Lognormal lengths of a step, cut at 32K, of as many tokens as the default step of ``compare``."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(500), 1.2, TOKENS_A_DEVICE * num_devices // 400))
    clipped = np.clip(drawn, 16, LONGEST).astype(np.int64)
    return clipped[: np.searchsorted(np.cumsum(clipped), TOKENS_A_DEVICE * num_devices)]


def measure(num_devices: int) -> tuple[float, float, float]:
    """Seconds of one core to prepare and to plan a step, and the predicted seconds of that step."""
    model, cluster = model_preset(MODEL), cluster_preset(f"{num_devices // 8}x8x{DEVICE}")
    problem = make_problem(
        AnalyticCost(model=model, cluster=cluster, dtype="bfloat16"),
        cluster=cluster,
        num_layers=model.num_layers,
        max_length=LONGEST,
        search_space=SearchSpace(),
        samples=[lengths(num_devices, seed=100 + sample) for sample in range(SAMPLES)],
    )
    drawn = lengths(num_devices, seed=1).tolist()
    batch = GlobalBatch(step=0, ids=tuple(range(len(drawn))), lengths=tuple(drawn))
    start_s = process_time()
    prepare("auto", problem)
    ready_s = process_time()
    plan = Planner(policy="auto", problem=problem).plan(PricedBatch(problem, batch))
    return ready_s - start_s, process_time() - ready_s, plan.time_s


def scale(*, quick: bool) -> Section:
    """The table, and the goals for 8,192 devices."""
    sizes = DEVICES[:1] if quick else DEVICES
    measured = {size: measure(size) for size in sizes}
    rows = [
        (f"{size:,}", number(preparing_s, "s"), number(plan_s, "s"), number(step_s, "s"), f"{plan_s / step_s:.2f}",
         f"{plan_s / step_s / CORES:.2f}")
        for size, (preparing_s, plan_s, step_s) in measured.items()
    ]  # fmt: skip
    goals: tuple[Goal, ...] = ()
    if GOAL_AT in measured:
        preparing_s, plan_s, step_s = measured[GOAL_AT]
        share = plan_s / step_s / CORES
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
        f"{CORES}th each.",
        head=("devices", "preparing", "plan", "predicted step", "plan / step", f"with {CORES} cores"),
        rows=rows,
        goals=goals,
    )
