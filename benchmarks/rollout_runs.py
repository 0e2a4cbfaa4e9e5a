"""What the benchmark of own batches trains on its ranks: rollouts by run.step under our plans or those of others."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from any_model_runs import VOCABULARY, make_llama
from balanced_dynamic_batches import recomputing, tuned
from torch.nn import functional as F

import lengthwise
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.finished_plan import to_plan
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.run import Run
from lengthwise.session.planning_args import find_cluster

SHORTEST, CAP, AT_CAP = 32, 1024, 0.2
"""Tokens on the ranks of this machine: a 32nd of those that are simulated."""
ROLLOUTS = 32
COLUMNS = ("mask", "advantage", "old")
SPEC = ModelSpec(
    name="llama of six layers", num_layers=6, hidden_size=128, ffn_size=352, num_heads=8, num_kv_heads=4, head_size=16,
    vocab_size=VOCABULARY,
)  # fmt: skip
"""What ``make_llama`` makes."""


def drawn(rng: np.random.Generator, count: int, *, shortest: int, cap: int) -> np.ndarray:
    """Lengths of rollouts: lognormal, a fifth of them at the cap."""
    lengths = rng.lognormal(np.log(cap / 8), 0.9, count)
    lengths[rng.random(count) < AT_CAP] = cap
    return np.clip(lengths, shortest, cap).astype(np.int64)


def rollouts(step: int) -> list[dict[str, Any]]:
    """The rollouts of a step, of all ranks."""
    rng = np.random.default_rng([11, step])
    return [
        {
            "input_ids": rng.integers(0, VOCABULARY, length),
            "mask": (np.arange(length) >= length // 4).astype(np.int64),
            "advantage": float(rng.normal()),
            "old": np.full(length, -6.2, dtype=np.float32),
        }
        for length in drawn(rng, ROLLOUTS, shortest=SHORTEST, cap=CAP)
    ]


def cost_of(limit_gib: float | None) -> AnalyticCost:
    """Costs on two cores from a data sheet: what is measured beside other programs misleads every side."""
    cluster = find_cluster("1x2xcpu")
    if limit_gib is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=round(limit_gib * GIB)))
    return AnalyticCost(model=SPEC, cluster=cluster, dtype="float32")


def prepared(policy: str, **options: Any) -> Run:
    """A run of rollouts."""
    logging.getLogger("lengthwise").setLevel(logging.ERROR)
    torch.manual_seed(0)
    return lengthwise.prepare(
        make_llama(), rollouts(0), policy=policy, sequences_per_step=ROLLOUTS, device="cpu", loss_columns=COLUMNS,
        step_max_length=CAP, verbose=False, check=False, max_stages=1, **options,
    )  # fmt: skip


def balancer(run: Run, *, degree: int, is_recomputing: bool) -> Any:
    """A planner that balances as verl does, with the fastest configuration of a degree by the same costs."""
    problem = run.planner.problem  # type: ignore[attr-defined]
    batches = [
        PricedBatch(problem, GlobalBatch(step=0, ids=tuple(range(len(sample))), lengths=tuple(sample.tolist())))
        for sample in problem.samples[:4]
    ]
    candidates = [candidate for candidate in problem.candidates if candidate.scheme.degree == degree]
    candidates = recomputing(candidates) if is_recomputing else candidates
    policy = tuned(problem, candidates, batches)
    assert policy is not None, "a configuration of this degree holds the longest sequence"

    def plan(batch: GlobalBatch) -> StepPlan:
        priced = PricedBatch(problem, batch)
        draft = policy.draft(priced)
        assert draft is not None, "it holds the longest sequence"
        return to_plan(priced, draft, policy="balanced dynamic batches")

    return plan


def train(sides: Sequence[str], steps: int, limit_gib: float | None) -> dict[str, dict[str, Any]]:
    """Seconds of each step of each side after the first, planning and exchange of items included.

    Sides take turns step by step, on the same rollouts. ``wall``: of the slowest rank; ``cpu``: processor seconds of
    the busiest rank, which other programs hardly change; ``begin``: until a step has its plan and its items; ``gaps``:
    of plans to a bound that no plan of the search space beats.
    """
    runs = {side: run_of(side, limit_gib) for side in sides}
    names = ("wall", "cpu", "begin", "schemes", "gaps")
    seconds: dict[str, dict[str, Any]] = {side: {name: [] for name in names} for side in sides}
    for number in range(steps + 1):
        items = rollouts(1 + number)
        for turn in range(len(sides)):
            side = sides[(turn + number) % len(sides)]
            row, plan = step_of(runs[side], items)
            if number:
                for name, values in zip(("wall", "cpu", "begin"), gather_rows(row).T.tolist()):
                    seconds[side][name].append(max(values))
                seconds[side]["schemes"] += [m.scheme.name for m in plan.pipelines for _ in m.micro_batches]
                seconds[side]["gaps"].append(plan.gap)
    for run in runs.values():
        run.close()
    return seconds


def run_of(side: str, limit_gib: float | None) -> Run:
    """The run of a policy, or of verl's balancer; no step changes what its costs are thought to be."""
    run = prepared("auto" if side.startswith("verl") else side, cost=cost_of(limit_gib), memory_gib=limit_gib)
    run.on_finish = None
    if side.startswith("verl"):
        run.planner = balancer(run, degree=int(side[-1]), is_recomputing="tuned" not in side)
    return run


def step_of(run: Run, items: list[dict[str, Any]]) -> tuple[torch.Tensor, StepPlan]:
    """Wall, processor and first seconds of a step on this rank, and its plan."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    step = run.step(items[run.world.rank :: run.world.size])
    begin_s = time.perf_counter() - start_s
    for micro_batch in step:
        step.backward(loss_of(run, step, micro_batch), mean_over="step")
    step.update()
    times = [time.perf_counter() - start_s, time.process_time() - cpu_s, begin_s]
    return torch.tensor(times, dtype=torch.float64), step.plan


def loss_of(run: Run, step: Any, micro_batch: Any) -> torch.Tensor:
    """The clipped surrogate of GRPO, a mean over all tokens of answers."""
    logits = run.model(**micro_batch.inputs).logits[0]
    logps = -F.cross_entropy(logits, micro_batch.labels, reduction="none")
    mask, advantage, old = (micro_batch.column(name, of="targets") for name in COLUMNS)
    ratio = (logps - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    share: torch.Tensor = -micro_batch.sum(surrogate * mask) / step.total("mask")
    return share


def least_gib() -> float:
    """A little less memory than a rank needs that computes the longest sequence alone, all layers recomputed."""
    scheme = uniform_scheme(SPEC.num_layers, degree=1, stages=1, method=Method.DENSE, recomputed=SPEC.num_layers)
    return 0.95 * float(cost_of(None).peak_bytes(np.asarray(CAP), scheme, num_devices=2)) / GIB
