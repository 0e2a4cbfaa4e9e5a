"""Attention with some of the heads at a time, as one device or the ranks of Ulysses have them (the idea of Untied
Ulysses, UPipe, 2026): each group of heads is projected, trades tokens for heads, attends and trades back.

What is there for all heads at once is the layer's input, the output of attention and its log-sum-exps; queries, keys,
values and what is exchanged of them are there for one group. The backward projects and exchanges each group again, and
runs no attention forward. A key/value head whose queries are in several groups comes with the first and stays to the
last of them.

Bytes on the device for a token of a rank between forward and backward, of width w: (D + N H) w for the normed input and
the output of attention, and 4 N / p for log-sum-exps, T of this rank's heads in float32. While a group has its
attention, over all T tokens with n of the rank's heads and k key/value heads: (3 n + 4 k) H w forward, twice that
backward. Traffic of a rank: forward what Ulysses sends; backward outputs, queries, keys and values once more.

T tokens of the pack, t of this rank, D hidden size, N query heads, n of one rank in one group, K, k key/value heads, H
head size, p ranks.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.operators import AttentionWeights, Tables
from lengthwise.runtime.models.rope import rotate_
from lengthwise.runtime.parallel.group_exchange import (
    HeadGroups,
    attend_group,
    keys_that_stay,
    queries_of,
    trade_group,
    trade_group_gradients,
)
from lengthwise.runtime.parallel.weights import OperatorWeights

AT_ONCE = 16_384
"""Tokens whose gradients are projected back or cast together, so that there is never another of all tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedAttention(HeadGroups):
    """Attention of one view of a pack in groups of heads, for one rank."""

    tables: Tables | None
    """Rotary tables of this rank's tokens."""

    def __call__(
        self,
        x_tD: Tensor,
        layer_weights: OperatorWeights,
        weights: AttentionWeights,
        kept_attention: KeptAttention | None = None,
    ) -> Tensor:
        """Attention of all heads, projected back: ``[t, D]``; ``kept_attention``: what is kept for a second forward."""
        out: Tensor = _Grouped.apply(
            x_tD, self, layer_weights, weights, kept_attention, *layer_weights.differentiable()
        )
        return out

    def rotate(self, heads: Tensor, count: int, *, backward: bool) -> None:
        """Rotate the first ``count`` of ``heads`` [t, n, H] in place, or back."""
        if self.tables is not None:
            cos, sin = self.tables
            rotated = torch.empty_like(heads[:, None, :count])
            rotate_(rotated, heads[:, None, :count], cos, -sin if backward else sin)
            heads[:, :count] = rotated[:, 0]


@dataclass(eq=False)
class _Projection:
    """The weights of the projections, as heads."""

    qkv: Tensor
    """[rows, H, D]"""
    bias: Tensor | None
    """[rows, H]"""
    proj: Tensor
    """[N, H, D]"""

    @classmethod
    def of(cls, layer_weights: OperatorWeights, weights: AttentionWeights) -> "_Projection":
        size = weights.head_size
        bias = None if weights.qkv_bias is None else layer_weights.tensor("qkv_bias").detach().unflatten(0, (-1, size))
        qkv, proj = (layer_weights.tensor(name).detach().unflatten(0, (-1, size)) for name in ("qkv", "proj"))
        return cls(qkv, bias, proj)

    def heads(self, x_tD: Tensor, rows: Tensor) -> Tensor:
        """Heads ``[t, rows, H]`` that some rows of the projection make."""
        bias = None if self.bias is None else self.bias[rows].flatten()
        return F.linear(x_tD, self.qkv[rows].flatten(0, 1), bias).unflatten(1, (len(rows), self.qkv.shape[1]))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tD, grouped, layer_weights, weights, kept_attention, *tensors):  # type: ignore[no-untyped-def]
        projection = _Projection.of(layer_weights, weights)
        y_tD, saved, present = torch.zeros_like(x_tD), [], None
        for group in grouped.groups:
            q, present, _ = _arrive(x_tD, grouped, group, projection, present)
            attend = partial(attend_group, q, present, group, grouped.ring)
            out, lse = attend() if kept_attention is None or not q.shape[1] else kept_attention.give(attend)
            del attend
            out_t = grouped.to_tokens([out], [queries_of], group)
            del q, out
            y_tD.addmm_(out_t.flatten(1), projection.proj[group.query_heads].flatten(0, 1))
            saved += [out_t, lse]
            present = keys_that_stay(present, group)
        ctx.grouped, ctx.layer_weights, ctx.weights = grouped, layer_weights, weights
        ctx.save_for_backward(x_tD, *saved)
        return y_tD

    @staticmethod
    @first_derivative_only("attention in groups of heads")
    def backward(ctx, dy_tD):  # type: ignore[no-untyped-def]
        grouped, (x_tD, *saved) = ctx.grouped, ctx.saved_tensors
        projection = _Projection.of(ctx.layer_weights, ctx.weights)
        wide = torch.promote_types(x_tD.dtype, torch.float32)
        gradients = _Projection(
            torch.zeros_like(projection.qkv),
            None if projection.bias is None else torch.zeros_like(projection.bias),
            torch.zeros_like(projection.proj),
        )
        dx_tD, stay = torch.zeros_like(x_tD, dtype=wide), [(None, None)]
        for group, out_t, lse in zip(grouped.groups, saved[::2], saved[1::2]):
            _group_backward(dy_tD, x_tD, dx_tD, grouped, group, projection, gradients, (out_t, lse), stay)
        named = {"qkv": gradients.qkv.flatten(0, 1), "proj": gradients.proj.flatten(0, 1)}
        if gradients.bias is not None:
            named["qkv_bias"] = gradients.bias.flatten()
        return _narrowed(dx_tD, x_tD.dtype), None, None, None, None, *ctx.layer_weights.take_gradients(named)


def _group_backward(  # type: ignore[no-untyped-def]
    dy_tD, x_tD, dx_tD, grouped, group, projection, gradients, result, stay
):
    """Add the gradients of one group, whose attention gave ``result``.

    ``stay``: keys and values of groups before that this one reads too, and their gradients so far; afterwards those
    that later groups need.
    """
    out_t, lse = result
    proj = projection.proj[group.query_heads].flatten(0, 1)
    dout_t = (dy_tD @ proj.T).unflatten(1, (group.num_queries, projection.proj.shape[1]))
    gradients.proj[group.query_heads] = (out_t.flatten(1).T @ dy_tD).unflatten(0, out_t.shape[1:])
    q, present, others = _arrive(x_tD, grouped, group, projection, stay[0][0], beside=(out_t, dout_t))
    arrived = [q, present, *others]
    del dout_t, q, present, others
    dheads = trade_group_gradients(arrived, lse, stay, grouped, group, grouped.ring)
    _project_back(dheads, x_tD, dx_tD, grouped, group, projection, gradients)


def _arrive(x_tD, grouped, group, projection, present, beside=()):  # type: ignore[no-untyped-def]
    """This rank's queries ``[T, n, H]``, its keys and values together with those ``present``, and what comes beside."""
    heads = projection.heads(x_tD, group.comes)
    grouped.rotate(heads, group.num_queries + group.num_coming, backward=False)
    qkv = heads.split([group.num_queries, group.num_coming, group.num_coming], dim=1)
    return trade_group(qkv, grouped, group, present, beside)


def _project_back(  # type: ignore[no-untyped-def]
    dheads, x_tD, dx_tD, grouped, group, projection, gradients
):
    """Add the gradients that those of a group's heads ``[t, rows, H]`` give to tokens and weights."""
    num_keys = (dheads.shape[1] - group.num_queries) // 2
    grouped.rotate(dheads, group.num_queries + num_keys, backward=True)
    flat, rows = dheads.flatten(1), group.leaves
    weight = projection.qkv[rows].flatten(0, 1)
    for dx_rD, flat_r in zip(dx_tD.split(AT_ONCE), flat.split(AT_ONCE)):
        dx_rD += flat_r @ weight
    gradients.qkv.index_add_(0, rows, (flat.T @ x_tD).unflatten(0, dheads.shape[1:]))
    if gradients.bias is not None:
        gradients.bias.index_add_(0, rows, flat.sum(0).unflatten(0, dheads.shape[1:]))


def _narrowed(x_tD: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype that is no wider, in the memory of ``x``, which is used no more."""
    if x_tD.dtype == dtype:
        return x_tD
    narrow_tD = x_tD.flatten().view(dtype)[: x_tD.numel()].view(x_tD.shape)
    for narrow_rD, x_rD in zip(narrow_tD.split(AT_ONCE), x_tD.split(AT_ONCE)):
        narrow_rD.copy_(x_rD.to(dtype))  # written over rows that are cast already, or are being cast
    return narrow_tD
