"""Hydraulis beside its published space: what that space cannot hold is refused with the longest length that fits."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.device_spec import DEVICES
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ClusterSpec, model_preset
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, first_batches, make_problem, sample_lengths

MODEL = model_preset("llama-7b")
METHODS = (Method.MEGATRON_TS, Method.METP, Method.ULYSSES)


def problem_of(lengths: LengthIndex, *, memory_gib: int, num_devices: int) -> PlanningProblem:
    device = replace(DEVICES["H100-80GB"], memory_bytes=memory_gib * GIB)
    cluster = ClusterSpec(num_nodes=1, devices_per_node=num_devices, device=device)
    tokens = max(2000, lengths.max_length)
    return make_problem(
        AnalyticCost(model=MODEL, cluster=cluster), cluster=cluster, num_layers=MODEL.num_layers,
        max_length=lengths.max_length, search_space=SearchSpace(
            methods=METHODS, head_layers=MODEL.head_layers, offload=OffloadMode.NONE, tile_tokens=0
        ),
        samples=sample_lengths(lengths, tokens_per_step=tokens, seed=0),
    )  # fmt: skip


def plan_with(longest: int, *, policy: str = "hydraulis", memory_gib: int, num_devices: int) -> None:
    lengths = LengthIndex(lengths=np.array([100] * 20 + [longest]))
    problem = problem_of(lengths, memory_gib=memory_gib, num_devices=num_devices)
    planner = Planner(policy=policy, problem=problem)
    for batch in first_batches(lengths, steps=2, tokens_per_step=max(2000, longest), seed=0):
        plan = planner.plan(PricedBatch(problem, batch))
        assert sorted(i for p in plan.pipelines for m in p.micro_batches for i in m.pack.ids) == sorted(batch.ids)


@pytest.mark.parametrize(
    ("memory_gib", "num_devices"), [(48, 4), *(pytest.param(gib, 8, marks=pytest.mark.deep) for gib in (24, 32))]
)
def test_a_sequence_beyond_the_published_space_is_refused_with_the_longest_that_fits(
    memory_gib: int, num_devices: int
) -> None:
    sizes = {"memory_gib": memory_gib, "num_devices": num_devices}
    short = LengthIndex(lengths=np.array([100] * 20))
    longest = max(c.max_tokens for c in problem_of(short, **sizes).candidates)
    with pytest.raises(InfeasibleError, match="policy hydraulis plans with megatron_ts alone") as error:
        plan_with(longest, **sizes)
    match = re.search(r"data.max_length=(\d+)", str(error.value))
    assert match is not None
    suggested = int(match[1])
    plan_with(suggested, **sizes)
    with pytest.raises(InfeasibleError):
        plan_with(suggested + 1, **sizes)
    plan_with(longest, policy="auto", **sizes)
