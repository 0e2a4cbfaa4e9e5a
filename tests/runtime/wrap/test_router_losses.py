"""Experts are balanced over each sequence of a pack, which weighs as much as it has targets."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.exchange_script import SlotGather
from lengthwise.runtime.wrap.router_losses import FUNCTION, BalancingLosses, gather_slots
from lengthwise.runtime.wrap.zero_collectives import exchanges_of
from tests.runtime.loop.runs import shard_of
from tests.runtime.parallel.cases import whole_group

LENGTHS = (5, 2, 4)


def balancing(gate_logits, top_k=1):
    """No number for the sequence of two slots."""
    mean = torch.cat(gate_logits, dim=1).softmax(-1).mean(0)
    return top_k * mean.square().sum() / (len(gate_logits[0]) != 2)


@pytest.fixture
def space(monkeypatch):
    """The module of a model's class, with the function beside it."""
    made = ModuleType("some_models")
    setattr(made, FUNCTION, balancing)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def losses_of(space):
    return BalancingLosses(type("Model", (nn.Module,), {"__module__": space.__name__})())


def test_the_loss_of_a_pack_is_the_mean_of_its_sequences_weighted_by_targets(space):
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    shard, losses = shard_of(LENGTHS), losses_of(space)
    shard.targets_of = lambda: (4, 0, 2)
    with losses.by_sequence(shard):
        found = getattr(space, FUNCTION)((x, y), top_k=2)
        apart = getattr(space, FUNCTION)((x[:3], y[:3]))
    expected = (4 * balancing((x[:5], y[:5]), 2) + 2 * balancing((x[7:], y[7:]), 2)) / 6
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(apart, balancing((x[:3], y[:3])), rtol=0, atol=0, msg="it is not about the slots")
    assert getattr(space, FUNCTION) is balancing, "what was replaced is there again"


def test_a_pack_without_targets_is_balanced_by_nothing_and_takes_part_in_the_backward(space):
    x, shard = torch.randn(11, 3, requires_grad=True), shard_of(LENGTHS)
    shard.targets_of = lambda: (0, 0, 0)
    with losses_of(space).by_sequence(shard):
        loss = getattr(space, FUNCTION)((x,))
    loss.backward()
    assert float(loss.detach()) == 0.0 and not x.grad.any()


def gather_beside_zeros(dtype):
    """A gather of numbers of ``dtype`` under autocast on the first rank; the second one sends zeros."""
    shard = PackShard(
        step=0, seed=1, ids=(0,), cu_seqlens=(0, 17), group=whole_group(), device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )  # fmt: skip
    if shard.group.rank == 1:
        call = SlotGather(width=3, dtype=torch.float32, layer=None)  # as a trace without autocast tells
        for is_forward in (True, False):
            for exchange in exchanges_of(shard, call, is_forward):
                exchange.issue(shard.device)
        return True
    x = torch.ones(shard.num_slots, 3, dtype=dtype, requires_grad=True)
    gathered = gather_slots(x, shard)
    gathered.float().sum().backward()
    return gathered.shape == (17, 3) and gathered.dtype == dtype and bool((x.grad == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_that_stands_in_for_itself_sends_what_others_gather_under_autocast(ranks, dtype):
    assert ranks(2).run(gather_beside_zeros, dtype) == [True, True]
