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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lengthwise.core.pipeline_config import head_bounds
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.operators import AttentionWeights, Tables
from lengthwise.runtime.models.rope import rotate_
from lengthwise.runtime.parallel.head_exchange import UlyssesShards
from lengthwise.runtime.parallel.ring_attention import Ring, ring_backward, ring_forward
from lengthwise.runtime.parallel.weights import OperatorWeights

AT_ONCE = 16_384
"""Tokens whose gradients are projected back or cast together, so that there is never another of all tokens."""
Run = tuple[int, int]
"""The first of neighbouring heads, and one past the last."""


@dataclass(frozen=True, kw_only=True)
class RankHeads:
    """Heads of one rank in one group."""

    queries: Run
    reads: Run
    """Key/value heads that the queries read."""
    comes: Run
    """Those of them that no group before has read."""
    leaves: Run
    """Those of them that no group after reads."""


def split_heads_in_groups(num_heads: int, num_kv_heads: int, *, degree: int, count: int) -> list[list[RankHeads]]:
    """For each of ``count`` groups the heads of each rank: whole key/value groups where there are enough of them."""
    size = num_heads // num_kv_heads
    of_ranks = []
    for start, end in pairwise(head_bounds(num_heads, num_kv_heads, degree=degree)):
        unit = size if start % size == end % size == 0 and (end - start) // size >= count else 1
        units = (end - start) // unit
        cuts = [start + number * units // count * unit for number in range(count + 1)]
        runs = list(pairwise(cuts))
        reads = [(a // size, -(-b // size)) if b > a else (-1, -1) for a, b in runs]
        heads, read_before = [], start // size
        for number, (queries, (first, last)) in enumerate(zip(runs, reads)):
            if first < 0:
                nothing = (read_before, read_before)
                heads.append(RankHeads(queries=queries, reads=nothing, comes=nothing, leaves=nothing))
                continue
            following = next((run[0] for run in reads[number + 1 :] if run[0] >= 0), last)
            comes, leaves = (max(first, read_before), last), (first, min(last, following))
            heads.append(RankHeads(queries=queries, reads=(first, last), comes=comes, leaves=leaves))
            read_before = last
        of_ranks.append(heads)
    return [list(group) for group in zip(*of_ranks)]


class HeadGroup:
    """One group of heads: which of each rank, and the rows of the weights that make them."""

    def __init__(self, heads: Sequence[RankHeads], rank: int, *, group_size: int, device: torch.device) -> None:
        """``heads``: of each rank; ``group_size``: query heads of each key/value head."""
        self.heads, self.mine = heads, heads[rank]
        queries = _all_of(item.queries for item in heads)
        self.num_queries, self.num_coming = len(queries), sum(_size(item.comes) for item in heads)
        rows = queries // group_size * (group_size + 2) + queries % group_size
        self.query_heads = to_device(queries, device)
        self.comes, self.leaves = (
            to_device(np.concatenate([rows, keys, keys + 1]), device)
            for keys in (
                _all_of(run) * (group_size + 2) + group_size
                for run in ([item.comes for item in heads], [item.leaves for item in heads])
            )
        )
        """Rows of the projection, of H each: of the queries, and of the keys and values that come, or that leave."""
        (start, end), (first, last) = self.mine.queries, self.mine.reads
        is_even = end - start == (last - first) * group_size or last - first == 1
        self.reads = None if is_even else to_device(np.arange(start, end) // group_size - first, device)


def _all_of(runs: Any) -> np.ndarray:
    return np.concatenate([np.arange(*run) for run in runs]).astype(np.int64)


def _size(run: Run) -> int:
    return run[1] - run[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedAttention:
    """Attention of one view of a pack in groups of heads, for one rank."""

    exchange: UlyssesShards
    ring: Ring
    """Of this rank alone, with all tokens."""
    tables: Tables | None
    """Rotary tables of this rank's tokens."""
    groups: tuple[HeadGroup, ...]

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

    def to_heads(self, pieces: Sequence[tuple[Tensor, Callable[[RankHeads], Run]]], group: HeadGroup) -> list[Tensor]:
        """Trade tokens for heads: of each ``[t, n, H]`` of all ranks' heads in the group, this rank's ``[T, n, H]``."""
        counts = [[_size(of(heads)) for heads in group.heads] for _, of in pieces]
        parts = zip(*(piece.split(count, dim=1) for (piece, _), count in zip(pieces, counts)))
        sent = [torch.cat(part, dim=1).flatten() for part in parts]
        rank, head_size = self.exchange.group.rank, pieces[0][0].shape[2]
        own_counts = [count[rank] for count in counts]
        receive = [size * sum(own_counts) * head_size for size in self.exchange.sizes]
        sizes = [len(part) for part in sent]
        sent[:] = [torch.cat(sent)]  # what is sent is freed once it is
        arrived = self.exchange.group.all_to_all(sent.pop(), sizes, receive)
        arrived = arrived.view(sum(self.exchange.sizes), sum(own_counts), head_size)
        arrived = arrived if self.exchange.into is None else arrived[self.exchange.into]
        return [part.contiguous() for part in arrived.split(own_counts, dim=1)]

    def to_tokens(self, pieces: Sequence[Tensor], of: Sequence[Callable[[RankHeads], Run]], group: HeadGroup) -> Tensor:
        """Trade heads for tokens: ``[t, n, H]`` of all ranks' heads, piece by piece, of this rank's ``[T, n, H]``."""
        joined = torch.cat(list(pieces), dim=1)
        joined = joined if self.exchange.back is None else joined[self.exchange.back]
        counts = [[_size(run(heads)) for run in of] for heads in group.heads]
        sizes, own_rows = self.exchange.sizes, self.exchange.sizes[self.exchange.group.rank]
        row_size, head_size = joined[0].numel() if len(joined) else 0, pieces[0].shape[2]
        receive = [own_rows * sum(count) * head_size for count in counts]
        arrived = self.exchange.group.all_to_all(joined.flatten(), [size * row_size for size in sizes], receive)
        by_rank = [
            part.view(own_rows, sum(count), head_size).split(count, dim=1)
            for part, count in zip(arrived.split(receive), counts)
        ]
        return torch.cat([piece for number in range(len(of)) for piece in (parts[number] for parts in by_rank)], dim=1)


def _queries(heads: RankHeads) -> Run:
    return heads.queries


def _comes(heads: RankHeads) -> Run:
    return heads.comes


def _leaves(heads: RankHeads) -> Run:
    return heads.leaves


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
            q, present = _arrive(x_tD, grouped, group, projection, present)
            out, lse = _attend(q, present, grouped, group, kept_attention)
            out_t = grouped.to_tokens([out], [_queries], group)
            del q, out
            y_tD.addmm_(out_t.flatten(1), projection.proj[group.query_heads].flatten(0, 1))
            saved += [out_t, lse]
            present = _stay(present, group)
        ctx.grouped, ctx.layer_weights, ctx.weights = grouped, layer_weights, weights
        ctx.save_for_backward(x_tD, *saved)
        return y_tD

    @staticmethod
    @once_differentiable
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


Pair = tuple[Tensor, Tensor]
"""Keys and values of this rank's heads, ``[T, k, H]`` each; or their gradients."""


def _group_backward(  # type: ignore[no-untyped-def]
    dy_tD, x_tD, dx_tD, grouped, group, projection, gradients, result, stay
):
    """Add the gradients of one group, whose attention gave ``result``.

    ``stay``: keys and values of groups before that this one reads too, and their gradients so far; afterwards those
    that later groups need.
    """
    (out_t, lse), (present, dpresent) = result, stay.pop()
    proj = projection.proj[group.query_heads].flatten(0, 1)
    dout_t = (dy_tD @ proj.T).unflatten(1, (group.num_queries, projection.proj.shape[1]))
    gradients.proj[group.query_heads] = (out_t.flatten(1).T @ dy_tD).unflatten(0, out_t.shape[1:])
    q, present, out, dout = _arrive(x_tD, grouped, group, projection, present, beside=(out_t, dout_t))
    del dout_t
    dpresent = _grown(dpresent, present[0], dx_tD.dtype)
    dq = q
    if q.shape[1]:
        dq, *dkv = ring_backward(dout, q, *_read(present, group), out, lse, grouped.ring)
        _add_read(dpresent, dkv, group)
        del dkv
    del q, out, dout
    num_left = _size(group.mine.leaves)
    left = [dx[:, :num_left].to(x_tD.dtype) for dx in dpresent]
    stay.append((_stay(present, group), _stay(dpresent, group)))
    del present, dpresent
    dheads = grouped.to_tokens([dq, *left], [_queries, _leaves, _leaves], group)
    del dq, left
    _project_back(dheads, x_tD, dx_tD, grouped, group, projection, gradients)


def _arrive(x_tD, grouped, group, projection, present, beside=()):  # type: ignore[no-untyped-def]
    """This rank's queries ``[T, n, H]``, its keys and values together with those ``present``, and what comes beside."""
    heads = projection.heads(x_tD, group.comes)
    grouped.rotate(heads, group.num_queries + group.num_coming, backward=False)
    q, k, v = heads.split([group.num_queries, group.num_coming, group.num_coming], dim=1)
    pieces = [(q, _queries), (k, _comes), (v, _comes), *((piece, _queries) for piece in beside)]
    q, k, v, *others = grouped.to_heads(pieces, group)
    if present is not None:
        k, v = (torch.cat([old, new], dim=1) if new.shape[1] else old for old, new in zip(present, (k, v)))
    return q, (k, v), *others


def _attend(q, present, grouped, group, kept_attention):  # type: ignore[no-untyped-def]
    """Attention of a group's queries, and its log-sum-exps."""
    if not q.shape[1]:
        return q, q.new_empty(0)
    attend = partial(ring_forward, q, *_read(present, group), grouped.ring)
    return attend() if kept_attention is None else kept_attention.give(attend)


def _read(present: Pair, group: HeadGroup) -> Pair:
    """Keys and values as the queries of a group read them."""
    if group.reads is None:
        return present
    return present[0][:, group.reads], present[1][:, group.reads]


def _add_read(dpresent: Pair, dkv: Sequence[Tensor], group: HeadGroup) -> None:
    """Add gradients of what :func:`_read` gives."""
    for total, dx in zip(dpresent, dkv):
        if group.reads is None:
            total += dx
        else:
            total.index_add_(1, group.reads, dx.to(total.dtype))


def _stay(present: Pair, group: HeadGroup) -> Pair | None:
    """Keys and values that later groups read too, without the storage of those that no other does; None: there are
    none.
    """
    num_left = _size(group.mine.leaves)
    if num_left == present[0].shape[1]:
        return None
    return present[0][:, num_left:].contiguous(), present[1][:, num_left:].contiguous()


def _grown(dpresent: Pair | None, keys: Tensor, wide: torch.dtype) -> Pair:
    """Gradients of keys and values so far, with zeros for those that came."""
    before = 0 if dpresent is None else dpresent[0].shape[1]
    room = (len(keys), keys.shape[1] - before, keys.shape[2])
    if dpresent is not None and not room[1]:
        return dpresent
    new = (keys.new_zeros(room, dtype=wide), keys.new_zeros(room, dtype=wide))
    if dpresent is None or not before:
        return new
    return torch.cat([dpresent[0], new[0]], dim=1), torch.cat([dpresent[1], new[1]], dim=1)


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
