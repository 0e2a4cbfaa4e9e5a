"""The same step on a GPU: NCCL, varlen attention, float32 masters."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lengthwise.runtime.comm.world import start_world, stop_world
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state.contents import contents, restore
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


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_takes_no_memory_of_its_own(name):
    """Neither the norm in float64 nor the optimizer has a copy of all gradients: at most one of a unit's."""
    world = start_world("cuda")
    try:
        spec = replace(SPEC, hidden_size=1024, ffn_size=4096, num_heads=8, num_kv_heads=8, head_size=128)
        model = build_model(spec, dtype=torch.bfloat16, device=world.device)
        state = ShardedState(model, world, replace(SETTINGS, name=name))
        state.step(lr=LR, clip=0.5)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        state.global_norm(torch.zeros((), device=world.device))
        state.step(lr=LR, clip=0.5)
        taken = torch.cuda.max_memory_allocated() - before
    finally:
        stop_world()
    largest = max(end - start for start, end in pairwise(state.table.bounds))
    assert taken < 1.1 * largest * state.pushed.element_size()


def test_a_restored_state_goes_on_as_the_one_that_was_saved():
    world = start_world("cuda")
    try:
        states = [new_state(world, torch.bfloat16, model_seed=seed) for seed in (1, 2)]
        for step in range(3):
            states[0].pushed.normal_(generator=torch.Generator("cuda").manual_seed(step))
            states[0].step(lr=LR, clip=1.0)
        restore(states[1], contents(states[0]), 3)
        for state in states:
            state.pushed.normal_(generator=torch.Generator("cuda").manual_seed(3))
            state.step(lr=LR, clip=1.0)
    finally:
        stop_world()
    assert torch.equal(states[0].master, states[1].master)


def new_state(world, dtype, *, model_seed):
    return ShardedState(build_model(SPEC, dtype=dtype, device=world.device, seed=model_seed), world, SETTINGS)
