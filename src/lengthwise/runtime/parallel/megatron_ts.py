"""Tensor and sequence parallel (Korthikanti et al. 2023): MegatronTS of ParaDySe.

T tokens of the pack, t of this rank, D hidden size, e, f this rank's rows of queries, keys and values, and of the
feed-forward. Before each operator the tokens are all-gathered, after it its partial sums are reduce-scattered. Only the
rank's own tokens are kept; the backward gathers them again.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.kept_attention import kernels_of
from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators, TokenwiseHalf
from lengthwise.runtime.models.tiles import split_evenly
from lengthwise.runtime.models.varlen_attention import attend
from lengthwise.runtime.parallel.stage_shard import LayerStage


def megatron_ts(stage: LayerStage) -> Operators:
    """Make the tensor- and sequence-parallel operators of one layer for one micro-batch.

    Raises:
        InputError: some rank has no key/value head.
    """
    bounds = stage.bounds["qkv"]
    if min(end - start for start, end in pairwise(bounds)) < 1:
        raise InputError(
            f"megatron_ts splits weights by key/value head, too few for degree {stage.group.size}; choose a lower "
            "degree or another method"
        )
    return MegatronTs(stage)


class MegatronTs:
    """Attention and feed-forward of one layer under tensor and sequence parallelism."""

    def __init__(self, stage: LayerStage) -> None:
        self._view, self._group, self._sizes = stage.view, stage.group, stage.view.shards.sizes
        self._tiles, self.kept_attention = stage.tiles, stage.kept_attention

    def attention(self, x_tD: Tensor, weights: AttentionWeights) -> Tensor:
        """This rank's heads over all tokens."""
        exchange, view = self._view.exchange, self._view.view
        (qkv_Te,) = _gathered_products(x_tD, [(weights.qkv, weights.qkv_bias)], self._group, self._sizes)
        if exchange.into is not None:
            qkv_Te = qkv_Te[exchange.into]
        qkv = weights.heads(qkv_Te, self._view.ordered_tables)
        with kernels_of(self.kept_attention):
            out_TnH = attend(*qkv, view.cu_seqlens, causal=view.causal)
        # Projected first, reordered then: in the other order the output of attention would be kept twice.
        sums_TD = out_TnH.flatten(1) @ weights.proj
        return _reduce_scatter(sums_TD if exchange.back is None else sums_TD[exchange.back], self._group, self._sizes)

    def ffn(self, x_tD: Tensor, weights: FfnWeights) -> Tensor:
        """This rank's columns over all tokens."""
        return self._columns(x_tD, weights, self._sizes)

    def tokenwise(self, half: TokenwiseHalf, x_tD: Tensor) -> Tensor:
        """The half of a layer behind attention; of tiles, if the plan has them, each is gathered and scattered alone.

        Every rank has as many, so that each gathers and scatters when the others do.
        """
        count = len(self._tiles.sizes(max(self._sizes)))
        if count == 1:
            return half(x_tD, self.ffn)
        sizes = [split_evenly(size, count) for size in self._sizes]
        by_tile = list(zip(*sizes))

        def of_tile(x_sD: Tensor, number: int) -> Tensor:
            return half(x_sD, partial(self._columns, sizes=by_tile[number]))

        return self._tiles.run(of_tile, x_tD, sizes[self._group.rank])

    def _columns(self, x_tD: Tensor, weights: FfnWeights, sizes: Sequence[int]) -> Tensor:
        products = [(weights.up, weights.up_bias)]
        if weights.gate is not None:
            products.append((weights.gate, None))
        up_Tf, *gate_Tf = _gathered_products(x_tD, products, self._group, sizes)
        active_Tf = weights.activate(up_Tf, gate_Tf[0] if gate_Tf else None)
        return _reduce_scatter(active_Tf @ weights.down, self._group, sizes)


def _gathered_products(
    x_tD: Tensor, products: Sequence[tuple[Tensor, Tensor | None]], group: Group, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """``x @ weight^T + bias`` of all ranks' tokens for each (weight, bias); one all-gather forward, two backward."""
    flat = [tensor for product in products for tensor in product]
    out: tuple[Tensor, ...] = _GatheredProducts.apply(x_tD, group, sizes, *flat)
    return out


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tD, group, sizes, *flat):  # type: ignore[no-untyped-def]
        ctx.group, ctx.sizes = group, sizes
        ctx.save_for_backward(x_tD, *flat)
        x_TD = group.gather(x_tD, sizes).wait()
        return tuple(F.linear(x_TD, weight, bias) for weight, bias in zip(flat[::2], flat[1::2]))

    @staticmethod
    @first_derivative_only("products whose tokens are gathered")
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x_tD, *flat = ctx.saved_tensors
        coming = ctx.group.gather(x_tD, ctx.sizes)
        weights, biases = flat[::2], flat[1::2]
        dx_TD = sum(grad @ weight for grad, weight in zip(grads, weights))
        scattering = ctx.group.reduce_scatter(dx_TD, ctx.sizes)
        x_TD = coming.wait()
        dflat = []
        for grad, bias in zip(grads, biases):
            dflat += [grad.T @ x_TD, None if bias is None else grad.sum(0)]
        return scattering.wait(), None, None, *dflat


def _reduce_scatter(x_TD: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """This rank's tokens of the sum over ranks; one reduce-scatter forward, one all-gather backward."""
    out: Tensor = _ReduceScatter.apply(x_TD, group, sizes)
    return out


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, group, sizes):  # type: ignore[no-untyped-def]
        ctx.group, ctx.sizes = group, sizes
        return group.reduce_scatter(x_TD, sizes).wait()

    @staticmethod
    @first_derivative_only("outputs that ranks sum up")
    def backward(ctx, grad_tD):  # type: ignore[no-untyped-def]
        return ctx.group.gather(grad_tD, ctx.sizes).wait(), None, None
