"""States to save and to load: trained a little, on any number of ranks."""

import random
from pathlib import Path

import torch
import torch.distributed as dist

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.contents import contents
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from tests.runtime.train.runs import LR, SETTINGS, RandomTokens, local_world, new_state
from tests.sim.random_plans import random_batch, random_plan

OPTIMIZERS = [
    OptimizerSettings(),
    OptimizerSettings(name="sgd"),
    OptimizerSettings(name="sgd", momentum=0.0),
    OptimizerSettings(name="adafactor"),
]


def name_of(settings: OptimizerSettings) -> str:
    return settings.name if settings.momentum else f"{settings.name} without momentum"


def train(model: Transformer, state: ShardedState, *, first: int, steps: int) -> list[float]:
    """Losses of some steps, each with batch and plan of its own."""
    losses = []
    for step in range(first, first + steps):
        rng = random.Random(step)
        batch = random_batch(rng, step)
        plan = random_plan(rng, batch, state.world.size)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        result = run_step(plan, model, state, source, lr=LR, clip_norm=0.5, clock=StepClock(state.world))
        losses.append(result.loss)
    return losses


def trained(
    dtype: torch.dtype = torch.float64, settings: OptimizerSettings = SETTINGS, *, steps: int = 2
) -> tuple[Transformer, ShardedState]:
    model, state = new_state(local_world(), dtype, settings=settings)
    train(model, state, first=0, steps=steps)
    return model, state


def save_trained(path: str, dtype: torch.dtype = torch.float64, settings: OptimizerSettings = SETTINGS, *, steps=2):
    """The contents over all ranks of a state that was saved under ``path``."""
    _, state = trained(dtype, settings, steps=steps)
    checkpoint.save(Path(path), state, {"step": steps, "sampler": {}}, keep=2)
    return whole_contents(state)


def loaded(path: str, dtype: torch.dtype = torch.float64, settings: OptimizerSettings = SETTINGS):
    model, state = new_state(local_world(), dtype, settings=settings)
    checkpoint.load(checkpoint.latest(Path(path)), state)
    return model, state


def whole_contents(state: ShardedState) -> dict[str, torch.Tensor]:
    """Every tensor of a state, from all ranks, by name; shares joined."""
    own = {name: (content.local, content.num_elements is None) for name, content in contents(state).items()}
    ranks = [None] * state.world.size
    dist.all_gather_object(ranks, own)
    names = sorted({name for held in ranks for name in held})
    found = {}
    for name in names:
        pieces = [held[name] for held in ranks if name in held]
        if pieces[0][1]:
            assert len(pieces) == 1, f"{name} is on {len(pieces)} ranks"
        found[name] = pieces[0][0] if pieces[0][1] else torch.cat([piece for piece, _ in pieces])
    return found


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
