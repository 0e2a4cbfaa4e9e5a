"""Ulysses attention: all-to-alls trade tokens for heads and back, and every rank attends with some of the heads over
the whole pack (DeepSpeed-Ulysses, Jacobs et al. 2023).

T tokens of the pack, t of this rank, N query heads, n of this rank, K key/value heads, k of them that this rank's
queries read, H head size, p ranks. Heads are split in consecutive runs, by whole key/value groups where there are
enough; else key/value heads are copied to every rank that has a query head of their group. p need not divide N.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.head_split import head_bounds
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.kept_attention import KeptAttention, kernels_of
from lengthwise.runtime.models.operators import attend_in
from lengthwise.runtime.models.varlen_attention import attend


@dataclass(eq=False, kw_only=True)
class Neighbours(Group):
    """Consecutive ranks of a group that all-to-all among themselves by an all-to-all of the whole group.

    Other ranks of it get nothing, so that no further communicator is needed; all of them call it at the same time.
    """

    all_ranks: Group

    @classmethod
    def of(cls, group: Group, size: int) -> "Neighbours":
        """The ``size`` consecutive ranks of ``group`` that this rank is among."""
        first = group.rank // size * size
        return cls(rank=group.rank - first, ranks=group.ranks[first : first + size], all_ranks=group)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """All-to-all of rows among these ranks."""
        return self.all_ranks.all_to_all(x, self.around(send), self.around(receive))

    def around(self, sizes: Sequence[int]) -> list[int]:
        """``sizes`` of these ranks, and zeros for the others of the whole group."""
        first = self.all_ranks.rank - self.rank
        return [*[0] * first, *sizes, *[0] * (self.all_ranks.size - first - self.size)]


@dataclass(frozen=True, kw_only=True, eq=False)
class UlyssesShards:
    """Sizes and token order of the all-to-alls of Ulysses attention, as one rank needs them."""

    group: Group
    sizes: tuple[int, ...]
    """Tokens of each rank."""
    view: AttentionView
    into: Tensor | None
    """[T] index that puts gathered tokens into the view's order; None: they are in it."""
    back: Tensor | None
    """[T] index that undoes ``into``."""


Core = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Attention over whole sequences, in the view's order, with some heads: ``[T, n, H]`` of queries, keys, values, and the
number of the first of these heads."""


def ulysses_attention(
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKH: Tensor,
    exchange: UlyssesShards,
    *,
    core: Core | None = None,
    kept_attention: KeptAttention | None = None,
) -> Tensor:
    """Attention of all heads of this rank's tokens, ``[t, N, H]``: two all-to-alls around whole sequences.

    ``core``: between the two; softmax attention within the sequences of the view, if left out. ``kept_attention``: what
    such an attention keeps for a second forward.
    """
    group, sizes = exchange.group, exchange.sizes
    if group.size == 1:
        return core(q_tNH, k_tKH, v_tKH, 0) if core else _attend_alone(q_tNH, k_tKH, v_tKH, exchange, kept_attention)
    num_heads, num_kv_heads, head_size = q_tNH.shape[1], k_tKH.shape[1], q_tNH.shape[2]
    group_size = num_heads // num_kv_heads
    bounds = head_bounds(num_heads, num_kv_heads, degree=group.size)
    runs = [_kv_run(bounds, rank, group_size) for rank in range(group.size)]
    parts = [
        torch.cat([q_tNH[:, start:end], k_tKH[:, first:last], v_tKH[:, first:last]], dim=1).flatten()
        for (start, end), (first, last) in runs
    ]
    (start, end), (first, last) = runs[group.rank]
    num_mine, num_kv = end - start, last - first
    received = [size * (num_mine + 2 * num_kv) * head_size for size in sizes]
    sent = [part.numel() for part in parts]
    parts[:] = [torch.cat(parts)]  # what is sent is freed once it is
    qkv_TnH = all_to_all(parts.pop(), sent, received, group)
    qkv_TnH = qkv_TnH.view(sum(sizes), num_mine + 2 * num_kv, head_size)
    if exchange.into is not None:
        qkv_TnH = qkv_TnH[exchange.into]
    q_TnH, k_TkH, v_TkH = qkv_TnH.split([num_mine, num_kv, num_kv], dim=1)
    if num_kv > 1 and num_mine != num_kv * group_size:
        # Parts of groups: our heads are not evenly spread over the key/value heads they read.
        reads = to_device(np.arange(start, end) // group_size - first, q_tNH.device)
        k_TkH, v_TkH = k_TkH[:, reads], v_TkH[:, reads]
    if num_mine == 0:
        out_TnH = q_TnH
    elif core is not None:
        out_TnH = core(q_TnH, k_TkH, v_TkH, start)
    else:
        with kernels_of(kept_attention):
            out_TnH = attend(q_TnH, k_TkH, v_TkH, exchange.view.cu_seqlens, causal=exchange.view.causal)
    del qkv_TnH, q_TnH, k_TkH, v_TkH
    if exchange.back is not None:
        out_TnH = out_TnH[exchange.back]
    counts = [end - start for (start, end), _ in runs]
    mine = sizes[group.rank]
    back = all_to_all(
        out_TnH.flatten(),
        [size * num_mine * head_size for size in sizes],
        [mine * count * head_size for count in counts],
        group,
    )
    pieces = back.split([mine * count * head_size for count in counts])
    return torch.cat([piece.view(mine, count, head_size) for piece, count in zip(pieces, counts)], dim=1)


def _attend_alone(
    q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, exchange: UlyssesShards, kept_attention: KeptAttention | None
) -> Tensor:
    """Attention of one rank, which has all tokens."""
    with kernels_of(kept_attention):
        return attend_in(exchange.view, q_tNH, k_tKH, v_tKH)


def _kv_run(bounds: Sequence[int], rank: int, group_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Query heads of a rank, and the key/value heads they read."""
    start, end = bounds[rank], bounds[rank + 1]
    return (start, end), (start // group_size, -(-end // group_size) if end > start else start // group_size)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Differentiable :meth:`~lengthwise.runtime.comm.group.Group.exchange` of flat numbers."""
    out: Tensor = _AllToAll.apply(x, tuple(send), tuple(receive), group)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):  # type: ignore[no-untyped-def]
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return group.all_to_all(x, send, receive).view(-1)

    @staticmethod
    @first_derivative_only("attention that ranks share", SHARED)
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.group.all_to_all(grad.contiguous(), ctx.receive, ctx.send), None, None, None
