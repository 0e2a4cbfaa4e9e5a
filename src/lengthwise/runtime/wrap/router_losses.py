"""Router load-balancing losses of mixture-of-experts models, computed for each sequence of a pack.

The stock model, called with one sequence, balances its experts over that sequence. So a pack balances them sequence by
sequence, and each sequence weighs as much as it has targets:

    auxiliary loss of a pack = sum over sequences of targets(i) * stock auxiliary loss(i) / targets of the pack

Logits of the routers are gathered over the ranks that share the pack, so that every rank has the same number; weighted
by each rank's share of the targets, as every loss is, the sum over ranks and micro-batches of a step is that of the
stock model called with one sequence at a time. No plan changes it.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError, Setting
from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.exchange_script import SlotGather
from lengthwise.runtime.wrap.zero_collectives import gather_sizes

GATHERS = 1 << 22
"""Offset of the numbers of gathers, to tell them from attention calls."""
FUNCTION = "load_balancing_loss_func"
"""What transformers calls the function; every model has it beside its classes."""


class BalancingLosses:
    """The load-balancing functions of a model, in the namespaces that its code calls them from."""

    def __init__(self, model: nn.Module) -> None:
        names = sorted({type(module).__module__ for module in model.modules()})
        spaces = [sys.modules[name] for name in names if name in sys.modules]
        self._places: list[tuple[ModuleType, Any]] = [
            (space, vars(space)[FUNCTION]) for space in spaces if callable(vars(space).get(FUNCTION))
        ]

    @contextmanager
    def by_sequence(self, shard: PackShard) -> Iterator[None]:
        """Within, the load-balancing losses are computed for each sequence of the pack."""
        with ExitStack() as stack:
            for space, function in self._places:
                setattr(space, FUNCTION, partial(_balance, function, shard))
                stack.callback(setattr, space, FUNCTION, function)
            yield


def _balance(function: Any, shard: PackShard, gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
    """The mean of a load-balancing loss over the sequences, weighted by their targets."""
    if not isinstance(gate_logits, tuple) or any(len(logits) != shard.num_slots for logits in gate_logits):
        return function(gate_logits, *args, **kwargs)
    if shard.tree is not None:
        raise InputError(
            "share_prefixes=True: the load-balancing loss of the model's router is a mean over all tokens of each "
            "sequence, of which some are shared; set output_router_logits=False, or leave share_prefixes out"
        )
    if shard.part is not None:
        raise InputError(
            "the load-balancing loss of the model's router is a mean over all tokens of each sequence, of which a "
            f"slice has some; set output_router_logits=False, or plan with {Setting.SLICES}=none"
        )
    widths = [logits.shape[1] for logits in gate_logits]
    logits_TW = gather_slots(torch.cat(gate_logits, dim=1), shard)
    losses, weights = [], []
    for (start, end), num_targets in zip(pairwise(shard.cu_seqlens), shard.num_targets()):
        if num_targets:
            losses.append(function(logits_TW[start:end].split(widths, dim=1), *args, **kwargs))
            weights.append(num_targets)
    if not losses:
        return logits_TW.sum() * 0.0
    total = sum(weights)
    return torch.stack([loss * (weight / total) for loss, weight in zip(losses, weights)]).sum()


def gather_slots(x_t: Tensor, shard: PackShard) -> Tensor:
    """All-gather ``[T, W]`` of the whole pack from every rank's ``[t, W]``; gradients are summed. One exchange.

    In float32 at least, as a rank that stands in for itself cannot know what autocast makes of each model's numbers.
    """
    wide = torch.promote_types(x_t.dtype, torch.float32)
    shard.attended.append(SlotGather(width=x_t.shape[1], dtype=wide, layer=shard.layer))
    x_T: Tensor = x_t * 1.0 if shard.group.size == 1 else _GatherSlots.apply(x_t.to(wide), shard).to(x_t.dtype)
    shard.note_exchange(x_T, GATHERS + len(shard.gathers))
    shard.gathers.append(x_T)
    return x_T


class _GatherSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_t: Tensor, shard: PackShard) -> Tensor:
        ctx.shard, ctx.width = shard, x_t.shape[1]
        send, receive = gather_sizes(shard.stage.shards.sizes, shard.group.rank, ctx.width)
        out = shard.group.all_to_all(x_t.flatten().repeat(shard.group.size), send, receive)
        x_T = out.new_empty(sum(shard.stage.shards.sizes), ctx.width)
        x_T[_places(shard)] = out.view(-1, ctx.width)
        return x_T

    @staticmethod
    @first_derivative_only("the load-balancing loss of a router whose slots ranks share", SHARED)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shard: PackShard = ctx.shard
        send, receive = gather_sizes(shard.stage.shards.sizes, shard.group.rank, ctx.width)
        out = shard.group.all_to_all(gradients[0][_places(shard)].flatten(), receive, send)
        return out.view(shard.group.size, -1, ctx.width).sum(0), None


def _places(shard: PackShard) -> Tensor:
    """[T] the places in the pack of the slots of the first rank, the second, and so on."""
    return torch.cat([torch.from_numpy(places) for places in shard.stage.shards.places]).to(shard.device)
