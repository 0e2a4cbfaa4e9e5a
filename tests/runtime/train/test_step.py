"""Steps that must not run, and steps that must not change anything."""

import math
import random
from dataclasses import replace

import pytest
import torch

from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.plan import Pipeline
from lengthwise.core.scheme import WEIGHTS_OF, Method, Scheme, Weights
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.executable import check_executable
from lengthwise.runtime.train.step import Agreed, agree, run_step
from tests.runtime.train.runs import RandomTokens, local_world, new_state, random_batch, random_plan


def example(num_ranks=2):
    rng = random.Random(0)
    batch = random_batch(rng, 0)
    return batch, random_plan(rng, batch, num_ranks)


def test_plans_for_another_world_are_refused():
    with pytest.raises(InputError, match="for 2 ranks, the run has 3"):
        check_executable(example()[1], 3, shard_degree=1)


def scheme(degree, method, *, stage_layers=(2,)):
    return Scheme(
        degree=degree, stage_layers=stage_layers, methods=(method,) * 2, recompute=(False,) * 2,
        weights=WEIGHTS_OF.get(method, Weights.WHOLE),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pipelines", "shard_degree", "message"),
    [
        ([((0, 1), scheme(1, Method.DENSE, stage_layers=(1, 1)))], 1, r"stage_layers=\(1, 1\) is not executable yet"),
        ([((0, 1), scheme(2, Method.METP))], 1, "needs its weights sharded at degree 2, the run holds them whole"),
        ([((0, 1), scheme(2, Method.RING))], 2, "needs its weights whole at degree 2, .* sharded over 2 ranks"),
        ([((0, 2), scheme(2, Method.RING)), ((1,), scheme(1, Method.DENSE))], 1, r"ranks=\(0, 2\) are not executable"),
    ],
)
def test_plans_that_are_not_executable_yet_name_the_field(pipelines, shard_degree, message):
    held = tuple(Pipeline(ranks=ranks, scheme=scheme, micro_batches=()) for ranks, scheme in pipelines)
    plan = replace(example()[1], pipelines=held)
    with pytest.raises(InputError, match=rf"pipelines\[0\].*{message}"):
        check_executable(plan, plan.num_devices, shard_degree=shard_degree)


def test_ranks_with_different_plans_stop_before_they_hang(ranks):
    ranks(3).run(_check_disagreement)


def _check_disagreement():
    world = local_world()
    plan = example(3)[1]
    assert agree(plan, world, StepClock(world), stop=False) == Agreed(stop=False, save_failed=False)
    if world.rank == 2:
        plan = replace(plan, lr_factor=0.5)
    with pytest.raises(CheckError, match=r"rank 2 plans [0-9a-f]{16}, rank 0 plans"):
        agree(plan, world, StepClock(world), stop=False)


def test_what_one_rank_knows_all_know(ranks):
    """That it was asked to stop; that a checkpoint could not be written."""
    for agreed in ranks(3).run(_agree_on_what_rank_one_knows):
        assert agreed == [Agreed(stop=True, save_failed=False), Agreed(stop=False, save_failed=True)]


def _agree_on_what_rank_one_knows():
    world = local_world()
    plan, is_told = example(3)[1], world.rank == 1
    return [
        agree(plan, world, StepClock(world), stop=is_told),
        agree(plan, world, StepClock(world), stop=False, save_failed=is_told),
    ]


def test_a_loss_that_is_not_finite_stops_every_rank_with_weights_unchanged(ranks):
    ranks(2).run(_check_not_finite)


def _check_not_finite():
    world = local_world()
    batch, plan = example()
    model, state = new_state(world, torch.float64)
    with torch.no_grad():
        dict(model.named_parameters())["embedding"].fill_(math.inf)
    before = state.weights.clone()
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
    with pytest.raises(LengthwiseError, match="not both finite; weights are unchanged"):
        run_step(plan, model, state, source, lr=0.1, clip_norm=1.0, clock=StepClock(world))
    assert torch.equal(before, state.weights)
