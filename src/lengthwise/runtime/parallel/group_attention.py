"""Attention in groups of heads over queries, keys and values that are made already: the form of models that project and
rotate by themselves. Each group trades tokens for heads over the ranks of Ulysses, attends and trades back.

Kept for the backward are queries, keys, values and outputs of this rank's tokens, with all heads, and the log-sum-exps
of its heads over all tokens; what is exchanged is there for one group. The backward exchanges each group again, and
runs no attention forward.

Bytes of width w for a token of a rank: (2 N + 2 K) H w are kept, and 4 N for log-sum-exps, where Ulysses keeps 2 N and
2 K, copies of key/value heads included, in its split of heads and the output again in the split of tokens. A group adds
(3 n + 4 k) p H w forward, twice that backward, with n and k heads of a rank in a group. Traffic: forward what Ulysses
sends; backward queries, keys, values and outputs once more.

T tokens of the pack, t of this rank, N query heads, K key/value heads, H head size, p ranks.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only
from lengthwise.runtime.parallel.group_exchange import (
    HeadGroup,
    HeadGroups,
    Stay,
    attend_group,
    keys_that_stay,
    queries_of,
    trade_group,
    trade_group_gradients,
)
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import sink_gradients

RingOf = Callable[[Tensor, range], Ring]
"""The attention of this rank alone over all tokens, as tasks, which may differ by head: from queries ``[T, n, H]`` and
the run of heads that they are of."""


def attend_in_groups(
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKH: Tensor,
    grouped: HeadGroups,
    *,
    ring_of: RingOf,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attention of all heads of this rank's tokens, ``[t, N, H]``, one group at a time: two all-to-alls for each.

    ``sinks_N``: a further logit of every query, one per head, whose weight takes no value.
    """
    out: Tensor = _InGroups.apply(q_tNH, k_tKH, v_tKH, sinks_N, grouped, ring_of)
    return out


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_tNH, k_tKH, v_tKH, sinks_N, grouped, ring_of):  # type: ignore[no-untyped-def]
        q_tNH, k_tKH, v_tKH = without_others(q_tNH, k_tKH, v_tKH)
        out_tNH, sums, present = q_tNH.new_empty(q_tNH.shape), [], None
        for group in grouped.groups:
            q, present, _ = trade_group(_heads_of(group, q_tNH, k_tKH, v_tKH), grouped, group, present)
            heads = range(*group.mine.queries)
            sinks = None if sinks_N is None else sinks_N[heads.start : heads.stop]
            out, lse = attend_group(q, present, group, ring_of(q, heads) if heads else grouped.ring, sinks)
            out_tNH[:, group.query_heads] = grouped.to_tokens([out], [queries_of], group)
            sums.append(lse)
            present = keys_that_stay(present, group)
            del q, out
        ctx.grouped, ctx.ring_of = grouped, ring_of
        ctx.save_for_backward(q_tNH, k_tKH, v_tKH, sinks_N, out_tNH, *sums)
        return out_tNH

    @staticmethod
    @first_derivative_only("attention in groups of heads", SHARED)
    def backward(ctx, dout_tNH):  # type: ignore[no-untyped-def]
        q_tNH, k_tKH, v_tKH, sinks_N, out_tNH, *sums = ctx.saved_tensors
        dq_tNH, dk_tKH, dv_tKH = q_tNH.new_empty(q_tNH.shape), *(x.new_zeros(x.shape) for x in (k_tKH, v_tKH))
        dsinks_N = None if sinks_N is None else torch.zeros_like(sinks_N)
        stay: Stay = [(None, None)]
        for group, lse in zip(ctx.grouped.groups, sums):
            beside = (out_tNH[:, group.query_heads], dout_tNH[:, group.query_heads])
            qkv = _heads_of(group, q_tNH, k_tKH, v_tKH)
            q, present, others = trade_group(qkv, ctx.grouped, group, stay[0][0], beside)
            heads, arrived = range(*group.mine.queries), [q, present, *others]
            if dsinks_N is not None and heads:
                places = slice(heads.start, heads.stop)
                dsinks_N[places] = sink_gradients(others[1], others[0], lse, sinks_N[places])
            ring = ctx.ring_of(q, heads) if heads else ctx.grouped.ring
            del beside, qkv, q, present, others
            dheads = trade_group_gradients(arrived, lse, stay, ctx.grouped, group, ring)
            dq, *dkv = dheads.split([group.num_queries, *[len(group.leaving_heads)] * 2], dim=1)
            dq_tNH[:, group.query_heads] = dq
            for total, dx in zip((dk_tKH, dv_tKH), dkv):
                total.index_add_(1, group.leaving_heads, dx)
            del dheads, dq, dkv, dx
        return dq_tNH, dk_tKH, dv_tKH, dsinks_N, None, None


def without_others(*tensors: Tensor) -> list[Tensor]:
    """``tensors``, with copies of views whose storage has more than these: kept, they would keep that, too.

    A projection of queries, keys and values together is such a storage, where queries and keys are rotated since.
    """
    used_bytes: Counter[int] = Counter()
    for tensor in tensors:
        used_bytes[tensor.untyped_storage()._cdata] += tensor.nbytes
    return [
        tensor.clone() if tensor.untyped_storage().nbytes() > used_bytes[tensor.untyped_storage()._cdata] else tensor
        for tensor in tensors
    ]


def _heads_of(group: HeadGroup, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of a group, and the keys and values that come with it."""
    return q_tNH[:, group.query_heads], k_tKH[:, group.coming_heads], v_tKH[:, group.coming_heads]
