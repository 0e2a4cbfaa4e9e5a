"""Random batches and random plans for them, and what one device computes: the two sides of the exactness tests."""

import random
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state.optimizer import make_optimizer
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from lengthwise.runtime.train.micro_batch_tensors import feed
from tests.sim.random_plans import SPEC, random_batch, random_plan

SETTINGS, LR, CLIP = OptimizerSettings(), 1e-2, 0.5


class RandomTokens:
    """Tokens that depend on the sequence alone."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def tokens(self, sequence: int) -> np.ndarray:
        return np.random.default_rng(sequence).integers(0, SPEC.vocab_size, self.lengths[sequence]).astype(np.uint16)


@cache
def local_world(ranks_per_node: int = 0) -> DistContext:
    """The world of the rank pool this runs in, as if on nodes of so many ranks; 0: on one."""
    size = dist.get_world_size()
    return DistContext(rank=dist.get_rank(), size=size, device=torch.device("cpu"), ranks_per_node=ranks_per_node)


def new_state(
    world: DistContext, dtype: torch.dtype, *, spec: ModelSpec = SPEC, settings: OptimizerSettings = SETTINGS
) -> tuple[Transformer, ShardedState]:
    model = build_model(spec, dtype=dtype, seed=1)
    return model, ShardedState(model, world, settings)


def master_weights(state: ShardedState) -> dict[str, torch.Tensor]:
    """All master weights, from all ranks, by parameter."""
    whole = torch.zeros(state.table.num_elements, dtype=torch.float64)
    at = 0
    for start, end in state.owned_layout.intervals[state.world.rank]:
        whole[start:end] = state.master[at : at + end - start]
        at += end - start
    dist.all_reduce(whole)
    return {name: whole[slice(*slot.interval)].view(slot.shape) for name, slot in state.table.slots.items()}


def train_on_ranks(
    seed: int, num_steps: int, dtype: torch.dtype, settings: OptimizerSettings = SETTINGS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final master weights of training with a new random plan at every step."""
    rng = random.Random(seed)
    world = local_world()
    model, state = new_state(world, dtype, settings=settings)
    losses = []
    for step in range(num_steps):
        batch = random_batch(rng, step)
        plan = random_plan(rng, batch, world.size)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        result = run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=StepClock(world))
        losses.append(result.loss)
    return losses, master_weights(state)


def train_on_one_device(
    seed: int,
    num_steps: int,
    num_ranks: int,
    settings: OptimizerSettings = SETTINGS,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by torch alone: a whole batch a step, torch's optimizer and clipping, masters of 32 bits or more."""
    rng = random.Random(seed)
    model = build_model(SPEC, dtype=dtype, seed=1)
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(w.detach().to(torch.promote_types(dtype, torch.float32))) for w in weights]
    optimizer = make_optimizer(
        settings, decaying=[p for p in masters if p.ndim > 1], others=[p for p in masters if p.ndim == 1]
    )
    losses = []
    for step in range(num_steps):
        batch = random_batch(rng, step)
        random_plan(rng, batch, num_ranks)  # draws what the ranks draw
        loss = whole_batch_loss(model, batch)
        for gradient, master in zip(torch.autograd.grad(loss, weights), masters):
            master.grad = gradient.to(master.dtype)
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters):
                weight.copy_(master)
        losses.append(loss.item())
    return losses, {name: p.detach().double() for (name, _), p in zip(model.named_parameters(), masters)}


def whole_batch_loss(model: torch.nn.Module, batch: GlobalBatch) -> torch.Tensor:
    """Mean loss over all targets, sequences laid end to end in one forward."""
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
    fed = feed(source, Pack(ids=batch.ids, lengths=batch.lengths), torch.device("cpu"))
    return model(fed.tokens_T, fed.cu_seqlens, fed.targets_T) / max(1, batch.num_targets)
