"""Promise 1: whatever the plan, the gradient is the one a single device computes on the whole batch."""

import random

import pytest
import torch

from lengthwise.runtime.model.build import build_model
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.step import run_micro_batches
from tests.runtime.train.runs import (
    SPEC,
    RandomTokens,
    local_world,
    new_state,
    random_batch,
    random_plan,
    train_on_one_device,
    train_on_ranks,
    whole_batch_loss,
)

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 0.15)}
"""Largest relative error of a loss, and relative distance of the weights after 20 steps. Measured: 1e-7 and 4e-7 in
float32, 1.2e-3 and 0.08 in bfloat16, where AdamW turns the sign of a small gradient that rounding flips into a step."""


LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 3), (4, 2), (4, 4)]
"""Ranks, and over how many of them weights are sharded."""


@pytest.mark.parametrize(("num_ranks", "shard_degree"), LAYOUTS)
def test_any_plan_gives_the_gradient_of_one_device(ranks, num_ranks, shard_degree):
    ranks(num_ranks).run(_check_gradients, seeds=range(8), shard_degree=shard_degree)


@pytest.mark.deep
@pytest.mark.parametrize(("num_ranks", "shard_degree"), [*LAYOUTS, (6, 1), (6, 3)])
def test_many_more_plans_give_the_gradient_of_one_device(ranks, num_ranks, shard_degree):
    ranks(num_ranks).run(_check_gradients, seeds=range(100, 250), shard_degree=shard_degree)


def _check_gradients(seeds, shard_degree):
    for seed in seeds:
        rng = random.Random(seed)
        batch = random_batch(rng, seed)
        world = local_world()
        plan = random_plan(rng, batch, world.size, shard_degree=shard_degree)
        reference = build_model(SPEC, dtype=torch.float64, seed=1)
        whole_batch_loss(reference, batch).backward()
        expected = torch.cat([p.grad.flatten() for p in reference.parameters()])

        model, state = new_state(world, torch.float64, shard_degree)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        run_micro_batches(plan, model, state.world, source, clock=StepClock(world))
        state.push()
        start, end = state.interval
        mine = torch.cat([segment.grad for segment, _ in state._segments])
        torch.testing.assert_close(mine, expected[start:end], rtol=EXACT, atol=EXACT)
        norm, _ = state.global_norm(torch.zeros(()))
        assert norm == pytest.approx(expected.norm().item(), rel=EXACT)


@pytest.mark.parametrize(("num_ranks", "shard_degree"), LAYOUTS)
def test_twenty_steps_of_random_plans_end_at_the_weights_of_one_device(ranks, num_ranks, shard_degree):
    expected_losses, expected = train_on_one_device(3, 20, num_ranks, shard_degree)
    for losses, weights in ranks(num_ranks).run(train_on_ranks, 3, 20, torch.float64, shard_degree):
        assert losses == pytest.approx(expected_losses, rel=EXACT, abs=EXACT)
        torch.testing.assert_close(weights, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_lower_precision_with_float32_masters_follows_the_exact_trajectory(ranks, dtype):
    loss_error, distance = CLOSE[dtype]
    expected_losses, expected = train_on_one_device(5, 20, 2)
    for losses, weights in ranks(2).run(train_on_ranks, 5, 20, dtype):
        assert losses == pytest.approx(expected_losses, rel=loss_error)
        assert (weights.double() - expected).norm() < distance * expected.norm()
