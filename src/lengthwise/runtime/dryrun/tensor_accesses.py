"""Which bytes of which storages an operation of torch reads and writes, and on which stream an exchange runs."""

import weakref
from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lengthwise.runtime.dryrun.collective_log import process_group
from lengthwise.runtime.dryrun.stream_order import KERNELS, Access, StreamOrder

_WRITES_ALL = ("allreduce_", "broadcast_", "reduce_", "recv_")
_READS_ALL = ("send", "barrier")


def stream_key(number: int) -> Hashable:
    """The stream of a number; 0 is that of kernels."""
    return ("stream", number) if number else KERNELS


class TensorAccesses:
    """Accesses by storages, which are forgotten when they are freed."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self._known: set[int] = set()

    def of_call(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[Access]:
        """What a call of an operator reads, and what it writes: the arguments that it changes, and its results."""
        written = _written(func)
        accesses = [
            self._access(tensor, is_write=place in written)
            for place, value in (*enumerate(args), *kwargs.items())
            for tensor in _tensors(value)
        ]
        return accesses + [self._access(tensor, is_write=True) for tensor in _tensors(out)]

    def of_copy(self, source: Tensor, target: Tensor | None) -> list[Access]:
        """What a copy reads and writes."""
        written = [] if target is None else [self._access(target, is_write=True)]
        return [self._access(source, is_write=False), *written]

    def of_exchange(self, name: str, args: Any) -> list[Access]:
        """What a collective or message of ``c10d`` reads and writes: its first argument is mostly its result."""
        return [
            self._access(tensor, is_write=name in _WRITES_ALL or (place == 0 and name not in _READS_ALL))
            for place, value in enumerate(args)
            for tensor in _tensors(value)
        ]

    def stream_of(self, args: Any, ranks: tuple[int, ...]) -> Hashable:
        """The stream of an exchange: every group has its own."""
        groups = [group.group_name for arg in args if (group := process_group(arg)) is not None]
        return (f"exchanges of {len(ranks)} ranks", groups[0] if groups else ranks)

    @staticmethod
    def is_async(func: Any, args: Any) -> bool:
        """Whether computing does not wait for an exchange at once; messages never do."""
        names = [argument.name for argument in func._schema.arguments]
        place = names.index("async_op") if "async_op" in names else None
        return place is None or place >= len(args) or bool(args[place])

    def _access(self, tensor: Tensor, *, is_write: bool) -> Access:
        storage = tensor.untyped_storage()
        key, width = storage._cdata, tensor.element_size()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._free, key)
        start = int(tensor.storage_offset()) * width
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        end = start + (int(extent) * width if tensor.numel() else 0)
        return Access(storage=key, start=start, end=end, is_write=is_write)

    def _free(self, key: int) -> None:
        self._known.discard(key)
        self._order.free(key)


@cache
def _written(func: Any) -> frozenset[int | str]:
    """Places and names of the arguments that an operator changes."""
    arguments = enumerate(func._schema.arguments)
    changed = [(n, x.name) for n, x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return frozenset(key for pair in changed for key in pair)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
