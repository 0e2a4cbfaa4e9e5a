"""Ring attention: queries stay, keys and values visit every rank (Liu et al. 2023), over packs.

t tokens of this rank, s of the rank whose block is here, N query heads, K key/value heads, H head size, p ranks.

Forward: p - 1 hops of keys and values; partial outputs are merged by their log-sum-exps. Backward: the same hops again,
and p hops of the gradients of keys and values, in float32 at least: they follow their block and collect what each rank
adds, until the last hop takes them home. Each hop is under way while the block before is computed with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.parallel.attention_blocks import (
    Task,
    attend_block,
    attend_block_backward,
    rows_of_keys,
    rows_of_queries,
)

_BLOCKS, _GRADIENTS = 1, 2  # tags of hops


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """Attention tasks of one rank at each step of the ring, and the order of its tokens."""

    group: Group
    sizes: tuple[int, ...]
    """Tokens of each rank."""
    tasks: tuple[tuple[Task, ...], ...]
    """For each rank, what our queries see of its keys."""
    into: Tensor | None = None
    """[t] index that puts this rank's tokens into the order of the view; None: they are in it."""
    back: Tensor | None = None
    """[t] index that undoes ``into``."""

    def ordered(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Reorder this rank's rows into the order of the view."""
        return tensors if self.into is None else tuple(x[self.into] for x in tensors)

    def restored(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Reorder this rank's rows from the view's order back into the pack's."""
        return tensors if self.back is None else tuple(x[self.back] for x in tensors)

    def source(self, step: int) -> int:
        """The rank whose block is here after ``step`` hops."""
        return (self.group.rank - step) % self.group.size

    def hop(self, block: Tensor, step: int, *, tag: int) -> AsyncResult:
        """Pass ``block``, here after ``step`` hops, on to the next rank."""
        arriving = self.sizes[self.source(step + 1)]
        return self.group.ring_shift(block, (block.shape[0], arriving, *block.shape[2:]), tag=tag)


def ring_attention(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: Ring, *, two_rounds: bool = False) -> Tensor:
    """Attention of this rank's queries over all ranks' keys; ``[t, N, H]``.

    ``two_rounds``: as ring self-attention does (Li et al. 2023), see :func:`two_round_ring`.
    """
    out: Tensor = _RingAttention.apply(*ring.ordered(q_tNH, k_tKH, v_tKH), ring, two_rounds)
    return ring.restored(out)[0]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, two_rounds):  # type: ignore[no-untyped-def]
        rounds = two_round_ring if two_rounds and ring.group.size > 1 else ring_forward
        out, lse = rounds(q, k, v, ring)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        return *ring_backward(dout, q, k, v, out, lse, ctx.ring), None, None


def ring_forward(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Output ``[t, N, H]`` and log-sum-exps ``[t, N]``. p - 1 hops of 2 t K H numbers."""
    wide = torch.promote_types(q_tNH.dtype, torch.float32)
    out = q_tNH.new_zeros(q_tNH.shape, dtype=wide)
    lse = q_tNH.new_full(q_tNH.shape[:2], -torch.inf, dtype=wide)
    block = torch.stack([k_tKH, v_tKH])
    for step in range(ring.group.size):
        coming = ring.hop(block, step, tag=_BLOCKS) if step + 1 < ring.group.size else None
        for task in ring.tasks[ring.source(step)]:
            k, v = (rows_of_keys(task, x) for x in block)
            part, part_lse = attend_block(rows_of_queries(task, q_tNH), k, v, causal=task.causal)
            _merge(rows_of_queries(task, out), rows_of_queries(task, lse), part, part_lse)
        block = coming.wait() if coming is not None else block
    return out.to(q_tNH.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial attention result into ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(part.to(out.dtype), (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def two_round_ring(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Ring attention in two rounds (ring self-attention, Li et al. 2023): first the keys go round for the sums of the
    softmax, then the values for the outputs.

    Theirs holds the scores [N, t, T] between the rounds, which is what runs out of memory; here the keys come again
    with the values. (p - 1) hops of t K H numbers and as many of 2 t K H.
    """
    wide = torch.promote_types(q_tNH.dtype, torch.float32)
    lse = q_tNH.new_full(q_tNH.shape[:2], -torch.inf, dtype=wide)
    keys = k_tKH[None]
    for step in range(ring.group.size):
        coming = ring.hop(keys, step, tag=_BLOCKS) if step + 1 < ring.group.size else None
        for task in ring.tasks[ring.source(step)]:
            rows = rows_of_queries(task, lse)
            k = rows_of_keys(task, keys[0])
            # The kernel of attention gives the sums and, of no use here, an output; plain products took far longer.
            _, part = attend_block(rows_of_queries(task, q_tNH), k, k, causal=task.causal)
            rows.copy_(torch.logaddexp(rows, part))
        keys = coming.wait() if coming is not None else keys
    out = q_tNH.new_zeros(q_tNH.shape, dtype=wide)
    block = torch.stack([k_tKH, v_tKH])
    for step in range(ring.group.size):
        coming = ring.hop(block, step, tag=_BLOCKS) if step + 1 < ring.group.size else None
        for task in ring.tasks[ring.source(step)]:
            k, v = (rows_of_keys(task, x) for x in block)
            part, part_lse = attend_block(rows_of_queries(task, q_tNH), k, v, causal=task.causal)
            share = (part_lse - rows_of_queries(task, lse)).exp()
            rows_of_queries(task, out).addcmul_(part.to(wide), share[..., None])
        block = coming.wait() if coming is not None else block
    return out.to(q_tNH.dtype), lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values. p - 1 hops of blocks, p of their gradients."""
    wide = lse.dtype
    dq = torch.zeros_like(q, dtype=wide)
    block, travelling = torch.stack([k, v]), None
    for step in range(ring.group.size):
        coming = ring.hop(block, step, tag=_BLOCKS) if step + 1 < ring.group.size else None
        dblock = torch.zeros_like(block, dtype=wide)
        for task in ring.tasks[ring.source(step)]:
            qkv = rows_of_queries(task, q), rows_of_keys(task, block[0]), rows_of_keys(task, block[1])
            dout_rows, out_rows, lse_rows = (rows_of_queries(task, x) for x in (dout, out, lse))
            parts = attend_block_backward(dout_rows, qkv, out_rows, lse_rows, causal=task.causal)
            rows_of_queries(task, dq).add_(parts[0])
            for dx, part in zip(dblock, parts[1:]):
                rows_of_keys(task, dx).add_(part)
        if travelling is not None:
            dblock += travelling.wait()
        travelling = ring.hop(dblock, step, tag=_GRADIENTS)
        block = coming.wait() if coming is not None else block
    dkv = travelling.wait() if travelling is not None else dblock
    return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)
