"""The same step on a GPU: NCCL, varlen attention, float32 masters."""

import random

import pytest
import torch

from lengthwise.runtime.comm.world import start_world, stop_world
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from tests.runtime.train.runs import CLIP, LR, SETTINGS, RandomTokens, train_on_one_device
from tests.sim.random_plans import SPEC, random_batch, random_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative error of a loss over ten steps; GPU kernels sum in another order, float32 products may use TF32."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ten_steps_on_a_gpu_follow_the_exact_trajectory(dtype):
    expected, _ = train_on_one_device(3, 10, 1)
    assert losses_on("cuda", dtype) == pytest.approx(expected, rel=TOLERANCE[dtype])


def losses_on(device, dtype):
    """Ten steps of random plans for one rank."""
    rng = random.Random(3)
    world = start_world(device)
    try:
        model = build_model(SPEC, dtype=dtype, device=world.device, seed=1)
        state = ShardedState(model, world, SETTINGS)
        losses = []
        for step in range(10):
            batch = random_batch(rng, step)
            plan = random_plan(rng, batch, 1)
            source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
            result = run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=StepClock(world))
            losses.append(result.loss)
    finally:
        stop_world()
    return losses
