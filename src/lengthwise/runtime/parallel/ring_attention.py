"""Ring attention: queries stay, keys and values visit every rank (Liu et al. 2023), over packs.

t tokens of this rank, s of the rank whose block is here, N query heads, K key/value heads, H head size, p ranks.

Forward: p - 1 hops of keys and values; partial outputs are merged by their log-sum-exps. Backward: the same hops again,
and p hops of the gradients of keys and values, in float32 at least: they follow their block and collect what each rank
adds, until the last hop takes them home. Each hop is under way while the block before is computed with.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lengthwise.runtime.comm.exchange import Exchange
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.varlen_attention import device_offsets
from lengthwise.runtime.parallel.attention_blocks import LaunchedAlone, PackedTask, Task, finite, packed, uses_flash

BLOCKS, GRADIENTS = 1, 2
"""Tags of hops."""


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
    packed_tasks: dict[int, tuple[PackedTask, ...]] = field(default_factory=dict)
    """``tasks`` as few launches for each rank, made at first use."""

    def tasks_of(self, source: int, q: Tensor) -> tuple[Task | PackedTask, ...]:
        """What our queries ``q`` see of the keys of ``source``: as few launches as can be, where the flash kernel takes
        them, else one for each run of equal blocks.
        """
        tasks = self.tasks[source]
        if not uses_flash(q) or any(isinstance(task, LaunchedAlone) for task in tasks):
            return tasks
        if source not in self.packed_tasks:
            self.packed_tasks[source] = packed(tasks, q.device)
        return self.packed_tasks[source]

    def only_launch(self, q: Tensor, k: Tensor) -> PackedTask | None:
        """The launch that is all of a rank's attention by itself, with nothing to merge and no sums; None: there are
        more, or other ranks.
        """
        if self.group.size > 1:
            return None
        first, *others = self.tasks_of(self.group.rank, q) or (None,)
        is_all = isinstance(first, PackedTask) and not others and first.is_of_all(len(q), len(k))
        return first if is_all else None  # type: ignore[return-value]

    def in_window(
        self, q: Tensor, cu_seqlens: tuple[int, ...], window: tuple[int, int], *, causal: bool
    ) -> "Ring | None":
        """The attention of one rank over whole sequences of which each query sees a window, as one launch of the flash
        kernel; None: the kernel does not take ``q``, or there are other ranks.

        ``window``: how many tokens before and after its own each sees.
        """
        if self.group.size > 1 or not uses_flash(q):
            return None
        longest = max(end - start for start, end in pairwise(cu_seqlens))
        before, after = (size if size < longest else -1 for size in window)
        offsets, rows = device_offsets(cu_seqlens, q.device), slice(0, len(q))
        launch = PackedTask(
            query_rows=rows, key_rows=rows, query_offsets=offsets, key_offsets=offsets, longest=(longest, longest),
            causal=causal, window=(before, 0 if causal else after),
        )  # fmt: skip
        return replace(self, tasks=((),), packed_tasks={self.group.rank: (launch,)})

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

    def blocks(self, block: Tensor) -> Generator[tuple[int, Tensor]]:
        """Each rank and its ``block``, this rank's first; p - 1 hops, each under way while the block before is used."""
        for step in range(self.group.size):
            coming = self.hop(block, step, tag=BLOCKS) if step + 1 < self.group.size else None
            try:
                yield self.source(step), block
            finally:  # also where the attention fails: nothing may be on its way into memory that is let go
                block = block if coming is None else coming.wait()

    def collect(self, gradients: Iterable[Tensor]) -> Tensor:
        """Sum the gradients of this rank's block over all ranks, each of which makes those of :meth:`blocks` in order.

        p hops: they follow their block and collect what each rank adds.
        """
        travelling: AsyncResult | None = None
        try:
            for step, gradient in enumerate(gradients):
                arriving, travelling = travelling, None
                if arriving is not None:
                    gradient += arriving.wait()
                travelling = self.hop(gradient, step, tag=GRADIENTS)
        except BaseException:
            if travelling is not None:
                travelling.wait()
            raise
        assert travelling is not None, "there is one rank at least"
        return travelling.wait()

    def exchanges(self, row_size: int, dtype: torch.dtype, *, backward: bool) -> Iterator[Exchange]:
        """What :func:`ring_attention` issues, or its backward: hops of blocks of ``row_size`` numbers a token."""
        for step in range(self.group.size):
            here, arriving = (self.sizes[self.source(place)] * row_size for place in (step, step + 1))
            hop = Exchange(group=self.group, send=(here,), receive=(arriving,), dtype=dtype, tag=BLOCKS)
            if step + 1 < self.group.size:
                yield hop
            if backward:
                yield replace(hop, dtype=torch.promote_types(dtype, torch.float32), tag=GRADIENTS)


class GatheredBlocks(Ring):
    """All blocks at once in place of a ring: one all-to-all (Llama 3's context parallelism, Grattafiori et al. 2024).

    Fewer calls than a ring, no overlap with attention, and room for the keys and values of all tokens.
    """

    def blocks(self, block: Tensor) -> Generator[tuple[int, Tensor]]:
        """Each rank and its ``block``, in order: one all-to-all."""
        row_size = block.shape[0] * block.shape[2:].numel()
        sizes = [size * row_size for size in self.sizes]
        sent = block.flatten().repeat(self.group.size)
        gathered = self.group.all_to_all(sent, [block.numel()] * self.group.size, sizes)
        for source, part in enumerate(gathered.split(sizes)):
            yield source, part.view(block.shape[0], self.sizes[source], *block.shape[2:])

    def collect(self, gradients: Iterable[Tensor]) -> Tensor:
        """Sum the gradients of this rank's block over all ranks: one all-to-all."""
        parts = list(gradients)
        home = parts[self.group.rank]
        sent = torch.cat([part.flatten() for part in parts])
        received = self.group.all_to_all(sent, [part.numel() for part in parts], [home.numel()] * self.group.size)
        return received.view(self.group.size, *home.shape).sum(0)

    def exchanges(self, row_size: int, dtype: torch.dtype, *, backward: bool) -> Iterator[Exchange]:
        """The all-to-all of blocks and, in the backward, that of their gradients."""
        to_each = [self.sizes[self.group.rank] * row_size] * self.group.size
        gather = Exchange(group=self.group, send=to_each, receive=[size * row_size for size in self.sizes], dtype=dtype)
        yield gather
        if backward:
            yield replace(gather.reversed, dtype=torch.promote_types(dtype, torch.float32))


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
    @once_differentiable
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
    wide = torch.promote_types(q_tNH.dtype, torch.float32)
    out = q_tNH.new_zeros(q_tNH.shape, dtype=wide)
    lse = q_tNH.new_full(q_tNH.shape[:2], -torch.inf, dtype=wide)
    if sinks_N is not None:
        lse.copy_(sinks_N.expand_as(lse))
    with closing(ring.blocks(torch.stack([k_tKH, v_tKH]))) as blocks:
        for source, block in blocks:
            for task in ring.tasks_of(source, q_tNH):
                part, part_lse = task.attend(task.queries(q_tNH), *(task.keys(x) for x in block))
                out_rows, lse_rows = task.queries(out), task.queries(lse)
                _merge(out_rows, lse_rows, part, part_lse)
                task.put_queries(out, out_rows)
                task.put_queries(lse, lse_rows)
    return out.to(q_tNH.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial attention result into ``out`` and ``lse``, in place."""
    merged = torch.logaddexp(lse, part_lse)
    total = finite(merged)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(part.to(out.dtype), (part_lse - total).exp_()[..., None])
    lse.copy_(merged)


def two_round_ring(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Ring attention in two rounds (ring self-attention, Li et al. 2023): first the keys go round for the sums of the
    softmax, then the values for the outputs.

    Theirs holds the scores [N, t, T] between the rounds, which is what runs out of memory; here the keys come again
    with the values. (p - 1) hops of t K H numbers and as many of 2 t K H.
    """
    wide = torch.promote_types(q_tNH.dtype, torch.float32)
    lse = q_tNH.new_full(q_tNH.shape[:2], -torch.inf, dtype=wide)
    with closing(ring.blocks(k_tKH[None])) as blocks:
        for source, keys in blocks:
            for task in ring.tasks_of(source, q_tNH):
                rows, k = task.queries(lse), task.keys(keys[0])
                # The kernel of attention gives the sums and, of no use here, an output; plain products took far longer.
                _, part = task.attend(task.queries(q_tNH), k, k)
                rows.copy_(torch.logaddexp(rows, part))
                task.put_queries(lse, rows)
    out = q_tNH.new_zeros(q_tNH.shape, dtype=wide)
    with closing(ring.blocks(torch.stack([k_tKH, v_tKH]))) as blocks:
        for source, block in blocks:
            for task in ring.tasks_of(source, q_tNH):
                part, part_lse = task.attend(task.queries(q_tNH), *(task.keys(x) for x in block))
                share = (part_lse - task.queries(lse)).exp()
                rows = task.queries(out)
                rows.addcmul_(part.to(wide), share[..., None])
                task.put_queries(out, rows)
    return out.to(q_tNH.dtype), lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values. p - 1 hops of blocks, p of their gradients."""
    if (launch := ring.only_launch(q, k)) is not None:
        return launch.attend_backward(dout, (q, k, v), out, lse)
    wide = lse.dtype
    dq = torch.zeros_like(q, dtype=wide)

    def gradients() -> Iterator[Tensor]:
        """Gradients that this rank's queries give the block of each rank."""
        with closing(ring.blocks(torch.stack([k, v]))) as blocks:
            for source, block in blocks:
                dblock = torch.zeros_like(block, dtype=wide)
                for task in ring.tasks_of(source, q):
                    qkv = task.queries(q), task.keys(block[0]), task.keys(block[1])
                    parts = task.attend_backward(task.queries(dout), qkv, task.queries(out), task.queries(lse))
                    task.add_to_queries(dq, parts[0])
                    for dx, part in zip(dblock, parts[1:]):
                        task.add_to_keys(dx, part)
                yield dblock

    dkv = ring.collect(gradients())
    return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)
