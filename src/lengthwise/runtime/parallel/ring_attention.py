"""Ring attention: queries stay, keys and values visit every rank (Liu et al. 2023), over packs.

t tokens of this rank, s of the rank whose block is here, N query heads, K key/value heads, H head size, p ranks.

Forward: p - 1 hops of keys and values; partial outputs are merged by their log-sum-exps. Backward: the same hops again,
and p hops of the gradients of keys and values, in float32 at least: they follow their block and collect what each rank
adds, until the last hop takes them home. Each hop is under way while the block before is computed with.
"""

from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.parallel.attention_blocks import finite
from lengthwise.runtime.parallel.ring import AnyTask, Ring, RingSchedule


def ring_attention(
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKH: Tensor,
    ring: Ring,
    *,
    sinks_N: Tensor | None = None,
    two_rounds: bool = False,
    kept_attention: KeptAttention | None = None,
) -> Tensor:
    """Attention of this rank's queries over all ranks' keys; ``[t, N, H]``.

    ``sinks_N``: a further logit of every query, one per head, whose weight takes no value. ``two_rounds``: as ring
    self-attention does (Li et al. 2023), see :func:`two_round_ring`.
    ``kept_attention``: what is kept for a second forward.
    """
    out: Tensor = _RingAttention.apply(*ring.ordered(q_tNH, k_tKH, v_tKH), sinks_N, ring, two_rounds, kept_attention)
    return ring.restored(out)[0]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, ring, two_rounds, kept_attention):  # type: ignore[no-untyped-def]
        def attend():  # type: ignore[no-untyped-def]
            if two_rounds and ring.group.size > 1:
                return two_round_ring(q, k, v, ring)
            return ring_forward(q, k, v, ring, sinks_N=sinks)

        out, lse = attend() if kept_attention is None else kept_attention.give(attend)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @first_derivative_only("attention that ranks, or sequences, share", SHARED)
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dsinks = None if sinks is None else sink_gradients(dout, out, lse, sinks)
        return *ring_backward(dout, q, k, v, out, lse, ctx.ring), dsinks, None, None, None


def sink_gradients(dout_tNH: Tensor, out_tNH: Tensor, lse_tN: Tensor, sinks_N: Tensor) -> Tensor:
    """Gradients of sinks: the value of one is zero, so its logit has the gradient -weight (dout . out)."""
    weights_tN = (sinks_N.to(lse_tN.dtype) - lse_tN).exp()
    return -(weights_tN * (dout_tNH.to(lse_tN.dtype) * out_tNH).sum(-1)).sum(0).to(sinks_N.dtype)


def ring_forward(
    q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: Ring, *, sinks_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output ``[t, N, H]`` and log-sum-exps ``[t, N]``. p - 1 hops of 2 t K H numbers."""
    if sinks_N is None and (launch := ring.only_launch(q_tNH, k_tKH)) is not None:
        return launch.attend(q_tNH, k_tKH, v_tKH)
    schedule = ring.schedule(q_tNH)
    q_tNH, k_tKH, v_tKH = ring.laid_out(q_tNH, k_tKH, v_tKH)
    out, lse = _outputs(q_tNH, schedule), _log_sums(q_tNH, schedule)
    with closing(ring.blocks(k_tKH, v_tKH)) as blocks:
        for source, (keys, values) in blocks:
            hop = schedule.hops[source]
            for task, is_first in zip(hop.tasks, hop.is_first):
                part, part_lse = task.attend(task.queries(q_tNH), task.keys(keys), task.keys(values))
                if is_first:
                    task.write_queries(out, part)
                    task.write_queries(lse, part_lse)
                else:
                    _merge(task, out, lse, part, part_lse)
    if sinks_N is not None:
        _add_sinks(out, lse, sinks_N)
    return out.to(q_tNH.dtype), lse


def _outputs(q_tNH: Tensor, schedule: RingSchedule) -> Tensor:
    """Room for outputs, in float32 at least; zeros for queries of which no task is the first."""
    wide = torch.promote_types(q_tNH.dtype, torch.float32)
    return schedule.queries.fill(q_tNH.new_empty(q_tNH.shape, dtype=wide), 0.0)


def _log_sums(q_tNH: Tensor, schedule: RingSchedule) -> Tensor:
    """Room for log-sum-exps, as :func:`_outputs`: those of no keys are -inf."""
    wide = torch.promote_types(q_tNH.dtype, torch.float32)
    return schedule.queries.fill(q_tNH.new_empty(q_tNH.shape[:2], dtype=wide), -torch.inf)


def _merge(task: AnyTask, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the result of a task into the rows of its queries in ``out`` and ``lse``."""
    out_rows, lse_rows = task.queries(out), task.queries(lse)
    merged = torch.logaddexp(lse_rows, part_lse)
    out_rows.lerp_(part.to(out.dtype), (part_lse - finite(merged)).exp_()[..., None])
    task.put_queries(out, out_rows)
    task.write_queries(lse, merged)


def _add_sinks(out: Tensor, lse: Tensor, sinks_N: Tensor) -> None:
    """Give every query a further logit whose value is zero, in place."""
    total = torch.logaddexp(lse, sinks_N.to(lse.dtype))
    out.mul_((lse - finite(total)).exp_()[..., None])
    lse.copy_(total)


def two_round_ring(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Ring attention in two rounds (ring self-attention, Li et al. 2023): first the keys go round for the sums of the
    softmax, then the values for the outputs.

    Theirs holds the scores [N, t, T] between the rounds, which is what runs out of memory; here the keys come again
    with the values. (p - 1) hops of t K H numbers and as many of 2 t K H.
    """
    schedule = ring.schedule(q_tNH)
    lse = _log_sums(q_tNH, schedule)
    with closing(ring.blocks(k_tKH)) as blocks:
        for source, (keys,) in blocks:
            hop = schedule.hops[source]
            for task, is_first in zip(hop.tasks, hop.is_first):
                k = task.keys(keys)
                # The kernel of attention gives the sums and, of no use here, an output; plain products took far longer.
                _, part = task.attend(task.queries(q_tNH), k, k)
                task.write_queries(lse, part if is_first else torch.logaddexp(task.queries(lse), part))
    out = _outputs(q_tNH, schedule)
    with closing(ring.blocks(k_tKH, v_tKH)) as blocks:
        for source, (keys, values) in blocks:
            hop = schedule.hops[source]
            for task, is_first in zip(hop.tasks, hop.is_first):
                part, part_lse = task.attend(task.queries(q_tNH), task.keys(keys), task.keys(values))
                share = (part_lse - task.queries(lse)).exp()[..., None]
                if is_first:
                    task.write_queries(out, part * share)
                else:
                    task.add_to_queries(out, part * share)
    return out.to(q_tNH.dtype), lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values. p - 1 hops of blocks, p of their gradients."""
    if (launch := ring.only_launch(q, k)) is not None:
        return launch.attend_backward(dout, (q, k, v), out, lse)
    wide, schedule = lse.dtype, ring.schedule(q)
    q, k, v, dout, out = ring.laid_out(q, k, v, dout, out)
    dq = schedule.queries.fill(q.new_empty(q.shape, dtype=wide), 0.0)

    def gradients() -> Iterator[Tensor]:
        """Gradients that this rank's queries give the keys and values of each rank, ``[2, s, K, H]``."""
        with closing(ring.blocks(k, v)) as blocks:
            for source, block in blocks:
                hop = schedule.hops[source]
                dblock = k.new_empty((2, *block[0].shape), dtype=wide)
                for dx in dblock:
                    hop.keys.fill(dx, 0.0)
                for task, is_first, is_first_of_keys in zip(hop.tasks, hop.is_first, hop.keys.is_first):
                    qkv = task.queries(q), task.keys(block[0]), task.keys(block[1])
                    parts = task.attend_backward(task.queries(dout), qkv, task.queries(out), task.queries(lse))
                    (task.write_queries if is_first else task.add_to_queries)(dq, parts[0])
                    for dx, part in zip(dblock, parts[1:]):
                        (task.write_keys if is_first_of_keys else task.add_to_keys)(dx, part)
                yield dblock

    dkv = ring.collect(gradients())
    return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)
