"""Memory-efficient tensor parallel (METP, Liang et al. 2025; in ParaDySe): next to nothing is kept.

t tokens of this rank, D hidden size, n heads of one weight shard, k its key/value heads, H head size, p ranks.

Every rank computes its own tokens through every weight shard in turn. Attention: the shards are broadcast by their
owners, the next one while this one is used; queries, keys and values of its heads are made for the local tokens, keys
and values go round (an inner ring), outputs are projected and added up. The backward makes queries, keys and values
again. Feed-forward: the shards go round in a ring; the backward makes the activations again, and the shards' gradients
travel with them, with one hop home.

The published code overwrites the parameter for p >= 3, sends one number of the last gradient hop, and fails for odd p.
Here shards travel in buffers of their own, and a rank may own no head at all.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, TokenwiseHalf, feed_forward
from lengthwise.runtime.parallel.ring_attention import ring_backward, ring_forward
from lengthwise.runtime.parallel.shards import FlatShards
from lengthwise.runtime.parallel.stage_shard import LayerStage

AnyWeights = TypeVar("AnyWeights", AttentionWeights, FfnWeights)
_SHARDS, _GRADIENTS = 3, 4  # tags of hops


class Metp:
    """Attention and feed-forward of one layer under METP: tokens stay, weight shards visit every rank."""

    def __init__(self, stage: LayerStage) -> None:
        self._stage, self.kept_attention = stage, stage.kept_attention

    def attention(self, x_tD: Tensor, weights: AttentionWeights) -> Tensor:
        """All heads of the local tokens, shard by shard."""
        out: Tensor = _Attention.apply(x_tD, self._stage, weights, *weights.tensors.values())
        return out

    def ffn(self, x_tD: Tensor, weights: FfnWeights) -> Tensor:
        """All columns of the local tokens, shard by shard."""
        out: Tensor = _Ffn.apply(x_tD, self._stage, weights, *weights.tensors.values())
        return out

    def tokenwise(self, half: TokenwiseHalf, x_tD: Tensor) -> Tensor:
        """The half of a layer behind attention; its feed-forward cuts tokens into tiles under each shard."""
        return half(x_tD, self.ffn)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tD, stage, weights, *shards):  # type: ignore[no-untyped-def]
        ctx.stage, ctx.weights = stage, weights
        ring = stage.view.ring
        y_tD, saved = torch.zeros_like(x_tD), []
        for _, shard in _broadcasts(weights, stage):
            qkv = shard.heads(F.linear(x_tD, shard.qkv, shard.qkv_bias), stage.view.tables)
            q, k, v = ring.ordered(*qkv)
            attend = partial(ring_forward, q, k, v, ring)
            out, lse = attend() if stage.kept_attention is None else stage.kept_attention.give(attend)
            y_tD += ring.restored(out)[0].flatten(1) @ shard.proj
            saved += [out, lse]
        ctx.save_for_backward(x_tD, *saved)
        return y_tD

    @staticmethod
    @first_derivative_only("attention that ranks share")
    def backward(ctx, dy_tD):  # type: ignore[no-untyped-def]
        stage = ctx.stage
        x_tD, *saved = ctx.saved_tensors
        flat, master = _flat(ctx.weights, stage), torch.promote_types(x_tD.dtype, torch.float32)
        dx_tD = torch.zeros_like(x_tD, dtype=master)
        mine = x_tD.new_zeros(flat.sizes[stage.group.rank], dtype=master)  # a rank may own no head
        reducing: tuple[int, AsyncResult] | None = None
        for (owner, shard), out, lse in zip(_broadcasts(ctx.weights, stage), saved[::2], saved[1::2]):
            dshard = _attention_gradients((x_tD, dy_tD, dx_tD), shard, (out, lse), stage)
            mine = _finished(reducing, mine, stage.group.rank)
            reducing = owner, stage.group.reduce(flat.join(dshard, master), owner)
        mine = _finished(reducing, mine, stage.group.rank)
        return dx_tD.to(x_tD.dtype), None, None, *_gradients(mine, ctx.weights, flat, stage.group)


def _finished(reducing: tuple[int, AsyncResult] | None, mine: Tensor, rank: int) -> Tensor:
    """The result of a finished reduction if this rank owns it, else ``mine``."""
    if reducing is None:
        return mine
    owner, pending = reducing
    total = pending.wait()
    return total if owner == rank else mine


class _Ffn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tD, stage, weights, *shards):  # type: ignore[no-untyped-def]
        ctx.stage, ctx.weights = stage, weights
        ctx.save_for_backward(x_tD)
        y_tD = torch.zeros_like(x_tD)
        sizes = stage.tiles.sizes(len(x_tD))
        for shard in _rotation(weights, stage):
            for x_sD, y_sD in zip(x_tD.split(sizes), y_tD.split(sizes)):
                y_sD += feed_forward(x_sD, shard)
        return y_tD

    @staticmethod
    @first_derivative_only("a feed-forward that ranks share")
    def backward(ctx, dy_tD):  # type: ignore[no-untyped-def]
        stage, group = ctx.stage, ctx.stage.group
        (x_tD,) = ctx.saved_tensors
        flat, master = _flat(ctx.weights, stage), torch.promote_types(x_tD.dtype, torch.float32)
        dx_tD = torch.zeros_like(x_tD, dtype=master)
        sizes = stage.tiles.sizes(len(x_tD))
        travelling: AsyncResult | None = None
        for step, shard in enumerate(_rotation(ctx.weights, stage)):
            dflat: Tensor | None = None
            for x_sD, dy_sD, dx_sD in zip(x_tD.split(sizes), dy_tD.split(sizes), dx_tD.split(sizes)):
                gradients = _ffn_gradients(x_sD, dy_sD, shard, dx_sD)
                if dflat is None:
                    dflat = flat.join(gradients, master)
                    continue
                for name, total in flat.split(dflat, (group.rank - step) % group.size).items():
                    total += gradients[name]
            assert dflat is not None, "there is one tile at least"
            if travelling is not None:
                dflat += travelling.wait()
            arriving = flat.sizes[(group.rank - step - 1) % group.size]
            travelling = group.ring_shift(dflat, (arriving,), tag=_GRADIENTS)
        assert travelling is not None
        return dx_tD.to(x_tD.dtype), None, None, *_gradients(travelling.wait(), ctx.weights, flat, group)


def _attention_gradients(
    rows: tuple[Tensor, Tensor, Tensor], shard: AttentionWeights, attended: tuple[Tensor, Tensor], stage: LayerStage
) -> dict[str, Tensor]:
    """Gradients of one shard of an attention, from ``rows``: input, gradient of the output, and that of the input, to
    which this shard's is added.
    """
    (x_tD, dy_tD, dx_tD), (out, lse), ring = rows, attended, stage.view.ring
    with torch.enable_grad():
        local = x_tD.detach().requires_grad_()
        inputs = [local, *(w.requires_grad_() for w in (shard.qkv, shard.qkv_bias) if w is not None)]
        qkv = ring.ordered(*shard.heads(F.linear(*inputs), stage.view.tables))
    dproj = ring.restored(out)[0].flatten(1).T @ dy_tD
    dout = ring.ordered((dy_tD @ shard.proj.T).unflatten(1, out.shape[1:]))[0]
    q, k, v = (x.detach() for x in qkv)
    dqkv = ring_backward(dout, q, k, v, out, lse, ring)
    dlocal, *dweights = torch.autograd.grad(qkv, inputs, dqkv)
    dx_tD += dlocal
    return dict(zip(("qkv", "qkv_bias"), dweights)) | {"proj": dproj}


def _ffn_gradients(x_tD: Tensor, dy_tD: Tensor, shard: FfnWeights, dx_tD: Tensor) -> dict[str, Tensor]:
    """Gradients of one shard of a feed-forward; that of the tokens is added to ``dx_tD``, and nothing else is left."""
    with torch.enable_grad():
        tensors = {name: w.requires_grad_() for name, w in shard.tensors.items()}
        local = x_tD.detach().requires_grad_()
        output = get_gradient_edge(feed_forward(local, shard))  # the output itself is freed
    dlocal, *dweights = torch.autograd.grad(output, [local, *tensors.values()], dy_tD)
    dx_tD += dlocal
    return dict(zip(tensors, dweights))


def _flat(weights: AttentionWeights | FfnWeights, stage: LayerStage) -> FlatShards:
    return FlatShards(weights.tensors, stage.bounds)


def _gradients(
    flat_gradient: Tensor, weights: AttentionWeights | FfnWeights, flat: FlatShards, group: Group
) -> list[Tensor]:
    """Gradients of this rank's weight shards, in their order and dtype."""
    pieces = flat.split(flat_gradient, group.rank)
    return [pieces[name].to(shard.dtype) for name, shard in weights.tensors.items()]


def _with_shards(weights: AnyWeights, pieces: dict[str, Tensor]) -> AnyWeights:
    return replace(weights, **pieces)  # type: ignore[arg-type]


def _broadcasts(weights: AttentionWeights, stage: LayerStage) -> Iterator[tuple[int, AttentionWeights]]:
    """Every owner with its shard, in turn; the next one is on its way while one is used."""
    flat, group = _flat(weights, stage), stage.group
    own_flat = flat.join(weights.tensors)
    owners = [rank for rank, size in enumerate(flat.sizes) if size]

    def start(owner: int) -> AsyncResult:
        buffer = own_flat if owner == group.rank else own_flat.new_empty(flat.sizes[owner])
        return group.broadcast(buffer, owner)

    coming = start(owners[0])
    for owner, following in pairwise([*owners, None]):
        assert owner is not None
        arrived = coming.wait()
        if following is not None:
            coming = start(following)
        yield owner, _with_shards(weights, flat.split(arrived, owner))


def _rotation(weights: FfnWeights, stage: LayerStage) -> Iterator[FfnWeights]:
    """Every shard in turn, beginning with this rank's own; the next one is on its way while one is used."""
    flat, group = _flat(weights, stage), stage.group
    here = flat.join(weights.tensors)
    for step in range(group.size):
        source = (group.rank - step) % group.size
        coming = None
        if step + 1 < group.size:
            coming = group.ring_shift(here, (flat.sizes[(source - 1) % group.size],), tag=_SHARDS)
        yield _with_shards(weights, flat.split(here, source))
        here = coming.wait() if coming is not None else here
