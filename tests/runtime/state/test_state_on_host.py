"""Master weights, optimizer and summed gradients in host memory: the same training, with nothing on the device."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.runtime.comm import host_memory
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.contents import contents
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from tests.runtime.state.saved import assert_same_tensors, whole_contents
from tests.runtime.train.families import random_case, source_of
from tests.runtime.train.runs import CLIP, LR, local_world
from tests.sim.random_plans import SPEC

OPTIMIZERS = {
    "adamw": OptimizerSettings(),
    "sgd": OptimizerSettings(name="sgd"),
    "adafactor": OptimizerSettings(name="adafactor"),
}


class SpoilingCopy(host_memory.CopyToHost):
    """A copy after which the device writes other values where the source was."""

    def __init__(self, source):
        super().__init__(source)
        source.detach().fill_(torch.nan)


def new_state(dtype, settings, *, on_host):
    model = build_model(SPEC, dtype=dtype, seed=1)
    return model, ShardedState(model, local_world(), settings, on_host=on_host)


def with_tiles(plan, tile_tokens):
    """The plan, whose feed-forwards all compute so many tokens at a time."""

    def changed(pipeline):
        micro_batches = tuple(replace(m, tile_tokens=None) for m in pipeline.micro_batches)
        return replace(pipeline, scheme=replace(pipeline.scheme, tile_tokens=tile_tokens), micro_batches=micro_batches)

    return replace(plan, pipelines=tuple(map(changed, plan.pipelines)))


def train(model, state, steps, *, tile_tokens=0):
    """Losses and norms of steps of random plans; what the device has of weights is spoilt between."""
    results, world = [], local_world()
    for seed in steps:
        batch, plan = random_case(SPEC, seed, world.size)
        plan = with_tiles(plan, tile_tokens)
        results.append(run_step(plan, model, state, source_of(batch), lr=LR, clip_norm=CLIP, clock=StepClock(world)))
        if state.on_host:
            state.weights.fill_(torch.nan)
    return [(result.loss, result.grad_norm) for result in results]


def compare(dtype, name):
    _, plain = device = new_state(dtype, OPTIMIZERS[name], on_host=False)
    _, offloaded = host = new_state(dtype, OPTIMIZERS[name], on_host=True)
    expected = train(*device, range(3))
    with mock.patch.object(host_memory, "CopyToHost", SpoilingCopy):
        assert train(*host, range(3)) == expected
    assert_same_tensors(
        {name: part.local for name, part in contents(offloaded).items()},
        {name: part.local for name, part in contents(plain).items()},
    )
    on_device = {tensor.untyped_storage().data_ptr() for tensor in (offloaded.weights, offloaded.gradients)}
    assert offloaded.master.untyped_storage().data_ptr() not in on_device
    assert (offloaded.gradients is offloaded.pushed) == (local_world().size == 1)
    return len({loss for loss, _ in expected}) == 3


CASES = [
    (1, torch.float64, "adamw"),
    (2, torch.bfloat16, "sgd"),
    *(pytest.param(n, torch.float64, name, marks=pytest.mark.deep) for n in (1, 2, 3) for name in OPTIMIZERS),
    *(pytest.param(n, torch.bfloat16, "sgd", marks=pytest.mark.deep) for n in (1, 3)),
]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("num_ranks", "dtype", "name"), CASES, ids=str)
def test_a_state_in_host_memory_trains_the_same_to_the_last_bit(ranks, num_ranks, dtype, name):
    assert all(ranks(num_ranks).run(compare, dtype, name))


def copies_of_tiles():
    """By tiles or not: losses and norms of one rank alone, and the sizes of what it copied to the host."""
    copied, results = [], []

    class Counting(host_memory.CopyToHost):
        def __init__(self, source):
            super().__init__(source)
            copied.append(source.numel())

    with mock.patch.object(host_memory, "CopyToHost", Counting):
        for tile_tokens in (0, 2):
            copied.clear()
            model, state = new_state(torch.float64, OPTIMIZERS["sgd"], on_host=True)
            results.append((train(model, state, range(2), tile_tokens=tile_tokens), sorted(copied)))
    return results


def test_one_rank_alone_adds_gradients_of_tiles_before_they_leave_the_device(ranks):
    """Each parameter leaves once a backward, whatever the tiles; sums in another order differ by some 1e-16."""
    ((whole, copies), (tiled, copies_in_tiles)), *_ = ranks(1).run(copies_of_tiles)
    torch.testing.assert_close(torch.tensor(tiled), torch.tensor(whole), rtol=1e-12, atol=0)
    assert copies == copies_in_tiles and copies


def compare_fused():
    """Weights of a bfloat16 model whose AdamW is fused, beside torch's plain one."""
    device, host = (new_state(torch.bfloat16, OptimizerSettings(), on_host=on_host) for on_host in (False, True))
    for state in (device, host):
        train(*state, range(2))
    assert host[1].optimizer.defaults["fused"] and not device[1].optimizer.defaults["fused"]
    return float((host[1].master - device[1].master).abs().max())


def test_the_fused_update_of_the_host_is_adamw(ranks):
    """Weights are moved by up to 1e-2 a step; of that float32 rounds some 1e-7."""
    assert max(ranks(2).run(compare_fused)) < 1e-6


def save(path, on_host):
    model, state = new_state(torch.float64, OPTIMIZERS["adamw"], on_host=on_host)
    train(model, state, range(2))
    checkpoint.save(path, state, {"step": 2, "sampler": {}}, keep=2)
    return whole_contents(state)


def load(path, on_host):
    model, state = new_state(torch.float64, OPTIMIZERS["adamw"], on_host=on_host)
    checkpoint.load(checkpoint.latest(path), state)
    restored = whole_contents(state)
    return restored, train(model, state, range(2, 4))


@pytest.mark.deep
@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_checkpoint_does_not_know_where_the_state_was(ranks, tmp_path, on_host):
    saved = ranks(3).run(save, tmp_path, on_host)[0]
    (same, expected), (other, losses) = (ranks(2).run(load, tmp_path, where)[0] for where in (on_host, not on_host))
    assert_same_tensors(same, saved)
    assert_same_tensors(other, saved)
    assert losses == expected


def discard(on_host):
    """A step whose gradients are discarded after its backwards, then another: as if the first had not been."""
    model, state = new_state(torch.float64, OPTIMIZERS["adamw"], on_host=on_host)
    state.materialize_all()
    (model.embedding.sum() * 7).backward()
    state.discard_gradient()
    assert not state.pushed.any() and not state.gradients.any()
    return train(model, state, [random.Random(1).randrange(100)])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_on_their_way_to_the_host_are_discarded_too(ranks, num_ranks):
    assert ranks(num_ranks).run(discard, True) == ranks(num_ranks).run(discard, False)
