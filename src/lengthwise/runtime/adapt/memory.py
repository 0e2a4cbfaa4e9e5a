"""When a micro-batch does not fit after all: its rank stands in for itself, and all ranks leave the step together.

A rank that ran out of memory may not just stop, for the others of its group wait for it in the exchanges of attention.
Which exchanges are left is known: every attention has two in the forward and two in the backward, recomputed layers
two more. So the rank sends zeros in their place, for what is left of this micro-batch and for all of the next ones, and
says at the update that the step is void. No rank hangs, nothing of the step is kept, and its batch is planned again.

What the model's forward would have returned is a :class:`NotComputed`, with which a user's loop goes on unharmed.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lengthwise.core.errors import LengthwiseError
from lengthwise.core.scheme import head_bounds
from lengthwise.runtime.adapt.shard import Attended, Shard
from lengthwise.runtime.comm.group import Group

_OF_CPU = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_CPU)


Exchanged = tuple[list[int], list[int]]
"""Numbers that a rank sends to each of its group, and receives from each."""


def exchanges(call: Attended, sizes: tuple[int, ...], rank: int) -> tuple[Exchanged, Exchanged]:
    """Of queries, keys and values; of outputs. Backwards go the other way.

    As :func:`~lengthwise.runtime.parallel.exchange.exchange_attention` issues them for slots of ``sizes``.
    """
    bounds = head_bounds(call.num_heads, call.num_kv_heads, degree=len(sizes))
    group_size = call.num_heads // call.num_kv_heads
    queries = [end - start for start, end in pairwise(bounds)]
    keys = [-(-end // group_size) - start // group_size if end > start else 0 for start, end in pairwise(bounds)]
    widths = [(q + 2 * k) * call.head_size for q, k in zip(queries, keys)]
    mine, size = sizes[rank], call.head_size
    there = ([mine * width for width in widths], [each * widths[rank] for each in sizes])
    back = ([each * queries[rank] * size for each in sizes], [mine * q * size for q in queries])
    return there, back


class StandIn:
    """Sends zeros for what is left of a micro-batch."""

    def __init__(self, calls: tuple[Attended, ...]) -> None:
        """``calls``: all of one forward, in order."""
        self._calls = calls

    def finish(self, shard: Shard, num_done: int, dtype: torch.dtype | None = None) -> None:
        """All exchanges of the micro-batch but the first ``num_done``."""
        if shard.group.size == 1:
            return
        for number, (call, (send, receive)) in enumerate(self._script(shard)):
            if number >= num_done:
                zeros = torch.zeros(sum(send), dtype=dtype or call.dtype, device=shard.device)
                shard.group.exchange(zeros, send, receive)

    def _script(self, shard: Shard) -> Iterator[tuple[Attended, Exchanged]]:
        """Forward; then backward, in which recomputed layers have their forward again first."""
        sizes, rank = shard.stage.shards.sizes, shard.group.rank
        forward = [(call, each) for call in self._calls for each in exchanges(call, sizes, rank)]
        yield from forward
        by_layer = [(layer, list(made)) for layer, made in groupby(forward, key=lambda made: made[0].layer)]
        for layer, made in reversed(by_layer):
            if layer is not None and shard.is_recomputed(layer):
                yield from made
            for call, (send, receive) in reversed(made):
                yield call, (receive, send)


def num_exchanges(group: Group) -> int:
    """All that this rank has taken part in."""
    return group.sent.calls["all_to_all"]


class NotComputed:
    """Stands for a tensor that was not computed: whatever is done with it gives another."""

    def __getattr__(self, name: str) -> "NotComputed":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "NotComputed":
        """As a method of a tensor."""
        return self

    def __getitem__(self, index: Any) -> "NotComputed":
        return self

    def __float__(self) -> float:
        return float("nan")

    def __format__(self, spec: str) -> str:
        return format(float("nan"), spec)

    def __repr__(self) -> str:
        return "not computed for lack of memory"

    def item(self) -> float:
        """Not a number."""
        return float("nan")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Any function of torch."""
        return cls()


def _arithmetic(self: NotComputed, *others: Any) -> NotComputed:
    return self


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod"):
    setattr(NotComputed, f"__{_name}__", _arithmetic)
    setattr(NotComputed, f"__r{_name}__", _arithmetic)
for _name in ("neg", "pos", "abs"):
    setattr(NotComputed, f"__{_name}__", _arithmetic)


class Outputs:
    """The form of what a forward returns, as it was last seen."""

    def __init__(self) -> None:
        self._form: pytree.TreeSpec | None = None

    def note(self, output: Any) -> None:
        """A forward returned this."""
        if self._form is None:
            self._form = pytree.tree_flatten(output)[1]

    def not_computed(self) -> Any:
        """The same with nothing in it.

        Raises:
            LengthwiseError: no forward was seen yet.
        """
        if self._form is None:
            raise LengthwiseError("the very first forward ran out of memory; lower max_length or use more devices")
        return pytree.tree_unflatten([NotComputed()] * self._form.num_leaves, self._form)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes attention in at the moment; None: it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
