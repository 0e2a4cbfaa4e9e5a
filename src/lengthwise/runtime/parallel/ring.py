"""A ring of ranks: which attention tasks each has with the keys of every other, and the hops of keys and values.

t tokens of this rank, s of the rank whose block is here, N query heads, K key/value heads, H head size, p ranks.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.runtime.comm.exchange import Exchange
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.models.varlen_attention import device_offsets
from lengthwise.runtime.parallel.attention_blocks import LaunchedAlone, Task
from lengthwise.runtime.parallel.first_writes import FirstWrites, Rows
from lengthwise.runtime.parallel.packed_tasks import PackedTask, packed, uses_flash

BLOCKS, GRADIENTS = 1, 2
"""Tags of hops."""


AnyTask = Task | PackedTask


@dataclass(frozen=True, kw_only=True, eq=False)
class HopTasks:
    """What the queries of a rank compute with the keys of one rank."""

    tasks: tuple[AnyTask, ...]
    is_first: tuple[bool, ...]
    """For each task, whether its queries have no result yet, of this hop or of those before."""
    keys: FirstWrites
    """The same of its keys, in this hop alone."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RingSchedule:
    """The hops of a ring by the rank that the keys are of, and the queries to start from nothing."""

    hops: dict[int, HopTasks]
    queries: FirstWrites


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """Attention tasks of one rank at each step of the ring, and the order of its tokens."""

    group: Group
    sizes: tuple[int, ...]
    """Tokens of each rank whose keys and values travel: those of sequences that other ranks hold tokens of, too."""
    tasks: tuple[tuple[Task, ...], ...]
    """For each rank, what our queries see of its keys."""
    into: Tensor | None = None
    """[t] index that puts this rank's tokens into the order of the view; None: they are in it."""
    back: Tensor | None = None
    """[t] index that undoes ``into``."""
    travelling: Tensor | None = None
    """Index of this rank's rows that travel, in the order of the view; None: all do."""
    packed_tasks: dict[int, tuple[PackedTask, ...]] = field(default_factory=dict)
    """``tasks`` as few launches for each rank, made at first use."""
    _schedules: dict[bool, RingSchedule] = field(init=False, default_factory=dict)

    def schedule(self, q: Tensor) -> RingSchedule:
        """The tasks of all hops with queries ``q``, and which is the first to write which rows."""
        uses_launches = uses_flash(q)
        if uses_launches not in self._schedules:
            tasks = {source: self.tasks_of(source, q) for source in self.sources}
            queries = FirstWrites.of([task.query_runs for hop in tasks.values() for task in hop], len(q))
            is_first = iter(queries.is_first)
            hops = {
                source: HopTasks(
                    tasks=of_hop,
                    is_first=tuple(next(is_first) for _ in of_hop),
                    keys=FirstWrites.of(
                        [task.key_runs for task in of_hop],
                        len(q) if self.travelling is not None and source == self.group.rank else self.sizes[source],
                    ),
                )
                for source, of_hop in tasks.items()
            }
            self._schedules[uses_launches] = RingSchedule(hops=hops, queries=queries)
        return self._schedules[uses_launches]

    def tasks_of(self, source: int, q: Tensor) -> tuple[AnyTask, ...]:
        """What our queries ``q`` see of the keys of ``source``: as few launches as can be, where the flash kernel takes
        them, else one for each run of equal blocks.
        """
        tasks = self.tasks[source]
        if not uses_flash(q) or any(isinstance(task, LaunchedAlone) for task in tasks):
            return tasks
        if source not in self.packed_tasks:
            self.packed_tasks[source] = packed(tasks, q.device)
        return self.packed_tasks[source]

    def laid_out(self, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """``q`` and others as the kernel that takes ``q`` reads them, so that no launch copies them again."""
        return tuple(x.contiguous() for x in (q, *others)) if uses_flash(q) else (q, *others)

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
        self, q: Tensor, cu_seqlens: tuple[int, ...], window: tuple[int, int], *, causal: bool, num_before: int = 0
    ) -> "Ring | None":
        """The attention of one rank over whole sequences of which each query sees a window, as one launch of the flash
        kernel; None: the kernel does not take ``q``, or there are other ranks.

        ``window``: how many tokens before and after its own each sees. ``num_before``: keys of the first sequence that
        are before those of the queries, of a slice.
        """
        if self.group.size > 1 or not uses_flash(q):
            return None
        key_bounds = (0, *(bound + num_before for bound in cu_seqlens[1:]))
        num_queries, num_keys = (max(b - a for a, b in pairwise(bounds)) for bounds in (cu_seqlens, key_bounds))
        before, after = (size if size < num_keys else -1 for size in window)
        query_rows, key_rows = (Rows.of([(0, bounds[-1])], q.device) for bounds in (cu_seqlens, key_bounds))
        launch = PackedTask(
            query_rows=query_rows, key_rows=key_rows, query_offsets=device_offsets(cu_seqlens, q.device),
            key_offsets=device_offsets(key_bounds, q.device), longest=(num_queries, num_keys), causal=causal,
            window=(before, 0 if causal else after),
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

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks in the order in which their blocks are computed with."""
        return tuple(map(self.source, range(self.group.size)))

    def hop(self, block: Tensor, step: int, *, tag: int) -> AsyncResult:
        """Pass ``block``, here after ``step`` hops, on to the next rank."""
        arriving = self.sizes[self.source(step + 1)]
        return self.group.ring_shift(block, (block.shape[0], arriving, *block.shape[2:]), tag=tag)

    def leaving(self, block: Tensor) -> Tensor:
        """The rows of this rank's block ``[n, t, ...]`` that travel."""
        return block if self.travelling is None else block[:, self.travelling]

    def brought_home(self, own_gradients: Tensor, sums: Tensor) -> Tensor:
        """The gradients that this rank has of its own block, with the sums over all ranks where rows travel."""
        if self.travelling is None:
            return sums
        own_gradients[:, self.travelling] = sums
        return own_gradients

    def blocks(self, *tensors: Tensor) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        """Each rank and its ``tensors``, such as keys and values, this rank's first; p - 1 hops, each under way while
        the block before is used.
        """
        if self.group.size == 1:
            yield self.group.rank, tensors
            return
        block = self.leaving(torch.stack(tensors))
        for step in range(self.group.size):
            coming = self.hop(block, step, tag=BLOCKS) if step + 1 < self.group.size else None
            try:
                yield self.source(step), block.unbind() if step or self.travelling is None else tensors
            finally:  # also where the attention fails: nothing may be on its way into memory that is let go
                block = block if coming is None else coming.wait()

    def collect(self, gradients: Iterable[Tensor]) -> Tensor:
        """Sum the gradients of this rank's block over all ranks, each of which makes those of :meth:`blocks` in order.

        p hops: they follow their block and collect what each rank adds.
        """
        own_gradients: Tensor | None = None
        travelling: AsyncResult | None = None
        try:
            for step, gradient in enumerate(gradients):
                if own_gradients is None:
                    own_gradients, gradient = gradient, self.leaving(gradient)
                arriving, travelling = travelling, None
                if arriving is not None:
                    gradient += arriving.wait()
                travelling = self.hop(gradient, step, tag=GRADIENTS)
        except BaseException:
            if travelling is not None:
                travelling.wait()
            raise
        assert own_gradients is not None and travelling is not None, "there is one rank at least"
        return self.brought_home(own_gradients, travelling.wait())

    def exchanges(self, row_size: int, dtype: torch.dtype, *, backward: bool) -> Iterator[Exchange]:
        """What an attention over the ring issues, or its backward: hops of blocks of ``row_size`` numbers a token."""
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

    @property
    def sources(self) -> tuple[int, ...]:
        """All ranks in order."""
        return tuple(range(self.group.size))

    def blocks(self, *tensors: Tensor) -> Generator[tuple[int, tuple[Tensor, ...]]]:
        """Each rank and its ``tensors``, in order: one all-to-all."""
        block = self.leaving(torch.stack(tensors))
        row_size = block.shape[0] * block.shape[2:].numel()
        sizes = [size * row_size for size in self.sizes]
        sent = block.flatten().repeat(self.group.size)
        gathered = self.group.all_to_all(sent, [block.numel()] * self.group.size, sizes)
        for source, part in zip(self.sources, gathered.split(sizes)):
            is_own = source == self.group.rank
            yield source, tensors if is_own else part.view(len(block), self.sizes[source], *block.shape[2:]).unbind()

    def collect(self, gradients: Iterable[Tensor]) -> Tensor:
        """Sum the gradients of this rank's block over all ranks: one all-to-all."""
        parts = list(gradients)
        own_gradients = parts[self.group.rank]
        home = parts[self.group.rank] = self.leaving(own_gradients)
        sent = torch.cat([part.flatten() for part in parts])
        received = self.group.all_to_all(sent, [part.numel() for part in parts], [home.numel()] * self.group.size)
        return self.brought_home(own_gradients, received.view(self.group.size, *home.shape).sum(0))

    def exchanges(self, row_size: int, dtype: torch.dtype, *, backward: bool) -> Iterator[Exchange]:
        """The all-to-all of blocks and, in the backward, that of their gradients."""
        to_each = [self.sizes[self.group.rank] * row_size] * self.group.size
        gather = Exchange(group=self.group, send=to_each, receive=[size * row_size for size in self.sizes], dtype=dtype)
        yield gather
        if backward:
            yield replace(gather.reversed, dtype=torch.promote_types(dtype, torch.float32))
