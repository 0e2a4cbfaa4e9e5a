"""Attention of slices of a pack: the queries of a slice over its own keys and those of the slices before it.

Keys and values of all slices stay until the first slice's backward. Backwards run in reverse, so a slice's keys and
values have the gradients of all slices behind it when its own backward comes.

T tokens of the pack, t of the slice, N query heads, K key/value heads, H head size; heads are those of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.chunked_loss import HeadGradients, HeadShare
from lengthwise.runtime.models.execution import SliceAttention
from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.parallel.attention_blocks import Task, joined
from lengthwise.runtime.parallel.group_attention import without_others
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import ring_forward, sink_gradients


class SliceKeys:
    """Keys and values of a micro-batch in one layer, and the gradients that later slices have given them."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._keys_values: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def put(self, tokens: range, k_tKH: Tensor, v_tKH: Tensor) -> None:
        """Keep keys and values of a slice."""
        if not self._keys_values:
            self._keys_values = [x.new_empty(self._num_tokens, *x.shape[1:]) for x in (k_tKH, v_tKH)]
        for room, x in zip(self._keys_values, (k_tKH, v_tKH)):
            room[tokens.start : tokens.stop].copy_(x)

    def of(self, tokens: range) -> tuple[Tensor, Tensor]:
        """Keys and values of neighbouring tokens, ``[tokens, K, H]``."""
        keys, values = (x[tokens.start : tokens.stop] for x in self._keys_values)
        return keys, values

    def gradients(self, tokens: range) -> list[Tensor]:
        """Views of the gradients of keys and values of ``tokens`` so far, in float32 at least."""
        if not self._gradients:
            self._gradients = [
                x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self._keys_values
            ]
        return [total[tokens.start : tokens.stop] for total in self._gradients]

    def take(self, tokens: range) -> list[Tensor]:
        """The gradients of a slice's keys and values, once all slices behind it have added theirs; the first slice is
        the last to ask.
        """
        dtypes = [x.dtype for x in self._keys_values]
        taken = [total[tokens.start : tokens.stop].to(dtype) for total, dtype in zip(self._gradients, dtypes)]
        if not tokens.start:
            self._keys_values, self._gradients = [], []
        return taken


@dataclass(frozen=True, kw_only=True, eq=False)
class PackSlice:
    """Neighbouring tokens of a pack that are computed by passes of their own."""

    tokens: range
    pack_bounds: tuple[int, ...]
    """Offsets of the pack's sequence boundaries."""
    keys: dict[int, SliceKeys] = field(repr=False)
    """By layer or call of attention, of all slices of the micro-batch on this rank; filled as layers run."""
    head: HeadGradients = field(repr=False, default_factory=HeadGradients)
    """The sum of all slices, where the head is this library's own."""

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Offsets of the boundaries within the slice of the sequences that are in it, from 0 to t."""
        inside = [bound - self.tokens.start for bound in self.pack_bounds if bound in self.tokens[1:]]
        return (0, *inside, len(self.tokens))

    @property
    def num_before(self) -> int:
        """Tokens of its first sequence in slices before it."""
        return self.tokens.start - max(bound for bound in self.pack_bounds if bound <= self.tokens.start)

    @property
    def head_share(self) -> HeadShare:
        """The first slice, whose backward is the last, gives the gradients of the head."""
        return HeadShare(self.head, gives=not self.tokens.start)

    def views(self, views: Sequence[AttentionView]) -> tuple[AttentionView, ...]:
        """The views of layers within the slice, made from those of the pack."""
        return tuple(replace(view, cu_seqlens=self.cu_seqlens, num_before=self.num_before) for view in views)

    def attention(self, layer: int, kept_attention: KeptAttention | None) -> SliceAttention:
        """Attention of ``layer``; ``kept_attention``: what it keeps for a second forward."""
        return partial(attend_slice, part=self, keys=self.keys_of(layer), kept_attention=kept_attention)

    def keys_of(self, layer: int) -> SliceKeys:
        """Keys and values of all slices so far in a layer, or call of attention."""
        return self.keys.setdefault(layer, SliceKeys(self.pack_bounds[-1]))

    @cached_property
    def seen(self) -> range:
        """The tokens of the pack whose keys any query of the slice sees."""
        return range(self.tokens.start - self.num_before, self.tokens.stop)

    @cached_property
    def ring(self) -> Ring:
        """The tasks of this rank alone: each sequence over itself, and the first one over what is before the slice."""
        within = [
            Task(query=start, num_queries=end - start, key=self.num_before + start, num_keys=end - start, causal=True)
            for start, end in pairwise(self.cu_seqlens)
        ]
        before = [Task(query=0, num_queries=self.cu_seqlens[1], key=0, num_keys=self.num_before)]
        tasks = (*joined(within), *(before if self.num_before else ()))
        return Ring(group=Group(rank=0), sizes=(len(self.seen),), tasks=(tasks,))


class PackSlices:
    """The slices of a pack on one rank, and what they share."""

    def __init__(self, pack_bounds: tuple[int, ...]) -> None:
        """``pack_bounds``: offsets of the pack's sequence boundaries."""
        self._pack_bounds = pack_bounds
        self._keys, self._head = dict[int, SliceKeys](), HeadGradients()

    def slice(self, tokens: range) -> PackSlice:
        """One of them, of these tokens of the pack."""
        return PackSlice(tokens=tokens, pack_bounds=self._pack_bounds, keys=self._keys, head=self._head)

    def clear(self) -> None:
        """Let go of keys and values, once the backward of the first slice is over, or none comes."""
        self._keys.clear()


def attend_slice(
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKH: Tensor,
    part: PackSlice,
    keys: SliceKeys,
    kept_attention: KeptAttention | None = None,
    *,
    ring: Ring | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention of a slice's queries, ``[t, N, H]``; its keys and values stay in ``keys`` for later slices.

    ``ring``: the tasks between these queries and the keys that any of them sees, where each sees fewer than all before
    it. ``sinks_N``: a further logit of every query, one per head, whose weight takes no value.
    """
    ring = ring or part.ring
    out: Tensor = _SliceAttention.apply(q_tNH, k_tKH, v_tKH, sinks_N, part, keys, ring, kept_attention)
    return out


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, part, keys, ring, kept_attention):  # type: ignore[no-untyped-def]
        (q,) = without_others(q)  # a view would keep the keys and values that came with it
        keys.put(part.tokens, k, v)
        k, v = keys.of(part.seen)

        def attend():  # type: ignore[no-untyped-def]
            return ring_forward(q, k, v, ring, sinks_N=sinks)

        out, lse = attend() if kept_attention is None else kept_attention.give(attend)
        ctx.part, ctx.keys, ctx.ring = part, keys, ring
        ctx.save_for_backward(q, out, lse, sinks)
        return out

    @staticmethod
    @first_derivative_only("attention in slices of a sequence", SHARED)
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        (q, out, lse, sinks), part, ring = ctx.saved_tensors, ctx.part, ctx.ring
        dsinks = None if sinks is None else sink_gradients(dout, out, lse, sinks)
        schedule, totals = ring.schedule(q), ctx.keys.gradients(part.seen)
        q, k, v, dout, out = ring.laid_out(q, *ctx.keys.of(part.seen), dout, out)
        dq = schedule.queries.fill(q.new_empty(q.shape, dtype=lse.dtype), 0.0)
        (hop,) = schedule.hops.values()
        for task, is_first in zip(hop.tasks, hop.is_first):
            qkv = task.queries(q), task.keys(k), task.keys(v)
            dq_part, *dkv = task.attend_backward(task.queries(dout), qkv, task.queries(out), task.queries(lse))
            (task.write_queries if is_first else task.add_to_queries)(dq, dq_part)
            for total, dx in zip(totals, dkv):
                task.add_to_keys(total, dx)
            del dq_part, dkv, dx
        return dq.to(q.dtype), *ctx.keys.take(part.tokens), dsinks, None, None, None, None
