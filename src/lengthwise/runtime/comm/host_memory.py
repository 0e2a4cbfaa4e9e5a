"""Copies between a device and host memory that run beside computing: on a GPU by pinned buffers, on their own stream.

Where the device is a CPU, a copy is another storage of the same memory, so that what runs is the same everywhere.
"""

from collections import deque
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

UNDER_WAY = 2
"""How many tensors that are to be added in host memory are on their way at most; the device has each until then."""

Places = Sequence[tuple[slice, slice]]
"""Slices of a flat total, and of what is added to it there."""


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pinned memory, which torch uses again when it is freed."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def host_empty(size: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised flat tensor in host memory."""
    return torch.empty(size, dtype=dtype)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU on which tensors are copied to host memory."""
    return torch.cuda.Stream(device)


def to_device(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values of host memory to ``device`` in ``dtype``; the host does not wait for the copy."""
    if device.type != "cuda":
        return values.to(device, dtype, copy=True)
    return pinned_empty(values.shape, dtype).copy_(values).to(device, non_blocking=True)


class CopyToHost:
    """A tensor of a device on its way to host memory; the tensor is kept until the copy is there."""

    def __init__(self, source: Tensor) -> None:
        self._source: Tensor | None = source
        self._event: torch.cuda.Event | None = None
        if not source.is_cuda:
            self._copy = source.detach().clone()
            return
        self._copy, stream = pinned_empty(source.shape, source.dtype), copy_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            self._copy.copy_(source.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The copy, when it is there."""
        if not self.is_done and self._event is not None:
            self._event.synchronize()
        self._source = None
        return self._copy


class RunningSums:
    """Adds what devices computed to sums, where they lie; those in host memory get it by way of copies, in order."""

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        self._coming: deque[tuple[Tensor, CopyToHost, Places | None]] = deque()

    def add(self, total: Tensor, addend: Tensor, places: Places | None = None) -> None:
        """Add ``addend`` to ``total``, in the order of the calls; ``places``: slices of a flat one, None: all of it."""
        if not self._on_host:
            _add(total, addend, places)
            return
        self._coming.append((total, CopyToHost(addend), places))
        while self._coming and (len(self._coming) > UNDER_WAY or self._coming[0][1].is_done):
            self._add_first()

    def finish(self) -> None:
        """Wait until everything is added."""
        while self._coming:
            self._add_first()

    def _add_first(self) -> None:
        total, copy, places = self._coming.popleft()
        _add(total, copy.wait(), places)


class UnitSums:
    """Gradients of one unit of a model on the device, until a backward comes to another; then they go to the host.

    What a backward adds to a parameter in several parts, such as tiles of tokens, is added up on the device first.
    """

    def __init__(self, sums: RunningSums, dtype: torch.dtype) -> None:
        """``dtype``: in which parts are added."""
        self._sums, self._dtype = sums, dtype
        self._unit: int | None = None
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, unit: int, total: Tensor, gradient: Tensor) -> None:
        """Let ``gradient``, which nobody else uses, of a parameter of ``unit`` be added to ``total``."""
        if unit != self._unit:
            self.flush()
            self._unit = unit
        if name in self._parts:
            gradient = self._parts[name][1].to(self._dtype).add_(gradient)
        self._parts[name] = total, gradient

    def flush(self) -> None:
        """Start to add all that is there."""
        parts, self._parts = self._parts, {}
        while parts:
            self._sums.add(*parts.pop(next(iter(parts))))


def _add(total: Tensor, addend: Tensor, places: Places | None) -> None:
    with torch.no_grad():
        if places is None:
            total.add_(addend)
            return
        for target, source in places:
            total[target] += addend[source]
