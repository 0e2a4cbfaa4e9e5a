"""The ranks that share a layer, and the collectives among them; their shares of anything may be of unequal size.

p ranks in the group. Every call is counted: bytes that this rank sends, as a ring algorithm sends them (Thakur et al.
2005), which for all but broadcast and reduce is also what it puts on the wire.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.runtime.comm.activity import CollectiveWait
from lengthwise.runtime.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter


@dataclass
class Traffic:
    """What one rank sent, by kind of collective."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, num_bytes: float) -> None:
        """Count one call."""
        self.num_bytes[kind] += num_bytes  # type: ignore[assignment]  # thirds of a byte occur
        self.calls[kind] += 1

    def clear(self) -> None:
        """Count from zero."""
        self.num_bytes.clear()
        self.calls.clear()


class AsyncResult:
    """A tensor on its way; what it is made from stays alive until it has come."""

    def __init__(
        self,
        make: Callable[[], Tensor],
        works: Sequence[dist.Work] = (),
        operation: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        """``make``, called once ``works`` are done, holds everything that must not go away before.

        ``operation`` among ``ranks`` (none: all) is named where a rank does not come to it.
        """
        self._make, self._works = make, works
        self._operation, self._ranks = operation, ranks

    def wait(self) -> Tensor:
        """The tensor, when it is there.

        Raises:
            CommunicationError: some rank did not come to it within the limit, or is gone.
        """
        if self._works:
            with CollectiveWait(self._operation, self._ranks):
                for work in self._works:
                    work.wait()
        return self._make()

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        return all(work.is_completed() for work in self._works)


@dataclass(eq=False, kw_only=True)
class Group:
    """This rank among the p ranks of a group."""

    rank: int
    """Place in the group, from 0."""
    ranks: tuple[int, ...] = (0,)
    """Their places in the world."""
    handle: dist.ProcessGroup | None = None
    """None where there is nobody to talk to."""
    sent: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> AsyncResult:
        """Every rank's rows, in rank order: ``[sum(sizes), ...]``. ``x`` has ``sizes[rank]`` rows.

        One all-gather; where sizes differ, of the largest for everyone.
        """
        if self.size == 1:
            return AsyncResult(lambda: x)
        longest = max(sizes)
        padded = _padded(x.contiguous(), longest)
        gathered = x.new_empty(self.size * longest, *x.shape[1:])
        self.sent.add("all_gather", _bytes(gathered) * (self.size - 1) / self.size)

        def make(keep: Tensor = padded) -> Tensor:
            if len(gathered) == sum(sizes):
                return gathered
            parts = gathered.unflatten(0, (self.size, longest)).unbind()
            return torch.cat([part[:size] for part, size in zip(parts, sizes)])

        work = all_gather(gathered, padded, group=self.handle, async_op=True)
        return AsyncResult(make, [work], "all-gather", self.ranks)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> AsyncResult:
        """This rank's rows of the sum over ranks of ``x`` ``[sum(sizes), ...]``. One reduce-scatter."""
        if self.size == 1:
            return AsyncResult(lambda: x)
        longest = max(sizes)
        if longest * self.size != sum(sizes):
            x = torch.cat([_padded(part, longest) for part in x.split(list(sizes))])
        x = x.contiguous()
        own_rows = x.new_empty(longest, *x.shape[1:])
        self.sent.add("reduce_scatter", _bytes(x) * (self.size - 1) / self.size)
        work = reduce_scatter(own_rows, x, group=self.handle, async_op=True)

        def make(keep: Tensor = x) -> Tensor:
            return own_rows[: sizes[self.rank]]

        return AsyncResult(make, [work], "reduce-scatter", self.ranks)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """All-to-all of rows: the first ``send[0]`` of ``x`` to rank 0, and so on; ``receive[r]`` come from rank r."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(receive), *x.shape[1:])
        row_bytes = out[:1].numel() * out.element_size() if len(out) else x[:1].numel() * x.element_size()
        self.sent.add("all_to_all", (sum(send) - send[self.rank]) * row_bytes)
        all_to_all(out, x.contiguous(), receive=receive, send=send, group=self.handle)
        return out

    def ring_shift(self, x: Tensor, shape: Sequence[int], *, tag: int = 0) -> AsyncResult:
        """Send ``x`` to the next rank and receive a tensor of ``shape`` from the one before: one hop of a ring.

        ``tag`` tells hops apart that are on their way at the same time.
        """
        received = x.new_empty(tuple(shape))
        if self.size == 1:
            return AsyncResult(lambda: x)
        x = x.contiguous()
        to, source = (self.ranks[(self.rank + step) % self.size] for step in (1, -1))
        sends = [dist.P2POp(dist.isend, x, to, self.handle, tag)] if x.numel() else []
        receives = [dist.P2POp(dist.irecv, received, source, self.handle, tag)] if received.numel() else []
        self.sent.add("ring", _bytes(x))
        with CollectiveWait("ring exchange", self.ranks):
            works = dist.batch_isend_irecv(sends + receives) if sends or receives else []

        def make(keep: Tensor = x) -> Tensor:
            return received

        return AsyncResult(make, works, "ring exchange", self.ranks)

    def broadcast(self, x: Tensor, owner: int) -> AsyncResult:
        """Broadcast ``x`` of rank ``owner`` to every rank, in place."""
        if self.size == 1:
            return AsyncResult(lambda: x)
        self.sent.add("broadcast", _bytes(x) * (self.size - 1) / self.size)
        with CollectiveWait("broadcast", self.ranks):
            work = dist.broadcast(x, self.ranks[owner], group=self.handle, async_op=True)
        assert work is not None
        return AsyncResult(lambda: x, [work], "broadcast", self.ranks)

    def reduce(self, x: Tensor, owner: int) -> AsyncResult:
        """Sum ``x`` over ranks onto rank ``owner``, in place; elsewhere the values mean nothing."""
        if self.size == 1:
            return AsyncResult(lambda: x)
        self.sent.add("reduce", _bytes(x) * (self.size - 1) / self.size)
        with CollectiveWait("reduce", self.ranks):
            work = dist.reduce(x, self.ranks[owner], group=self.handle, async_op=True)
        assert work is not None
        return AsyncResult(lambda: x, [work], "reduce", self.ranks)

    def send(self, x: Tensor, to: int, *, tag: int = 0) -> AsyncResult:
        """Send ``x`` to the rank at place ``to``."""
        x = x.contiguous()
        self.sent.add("message", _bytes(x))
        with CollectiveWait("send", self.ranks):
            work = dist.isend(x, self.ranks[to], group=self.handle, tag=tag) if x.numel() else None
        return AsyncResult(lambda: x, [work] if work else [], f"send to rank {self.ranks[to]}", self.ranks)

    def receive(self, x: Tensor, source: int, *, tag: int = 0) -> AsyncResult:
        """Receive into ``x`` what the rank at place ``source`` sends."""
        with CollectiveWait("receive", self.ranks):
            work = dist.irecv(x, self.ranks[source], group=self.handle, tag=tag) if x.numel() else None
        return AsyncResult(lambda: x, [work] if work else [], f"receive from rank {self.ranks[source]}", self.ranks)

    def all_reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce ``x`` over ranks, to a sum or maximum, in place. One all-reduce."""
        if self.size > 1:
            self.sent.add("all_reduce", 2 * _bytes(x) * (self.size - 1) / self.size)
            all_reduce(x, operation, group=self.handle)
        return x


def _padded(x: Tensor, num_rows: int) -> Tensor:
    if len(x) == num_rows:
        return x
    return torch.cat([x, x.new_zeros(num_rows - len(x), *x.shape[1:])])


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
