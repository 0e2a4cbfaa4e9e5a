"""Offload of activations: what the forward of a layer saves for its backward is in host memory in between.

On a GPU every copy runs behind the host's back: out on one stream as soon as a tensor is saved, back on another while
the layer after it, in the order of the forward, has its backward. Computing waits for copies by events, the host never
does. On the device are the saved tensors of two layers at most: in the forward those of the layer that computes and of
the one before, which are being copied; in the backward those of the layer that computes and of the one that comes next,
which are on their way. Where a layer is recomputed, all that it saves is its input.

Bytes on the device for a token between forward and backward: 0. Bytes in host memory: what the layer saves, each
storage once, rounded up to 512 bytes. Where the device is a CPU, copies are other storages of the same memory.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from lengthwise.runtime.comm.host_blocks import HostBlocks

Keep = Callable[[Tensor], bool]
"""Whether a saved tensor stays on the device: a weight, or what layers share."""


class HostOffload:
    """Moves saved tensors of one device to host memory and back; used again from step to step."""

    def __init__(self, device: torch.device | str, *, limit_bytes: int | None = None) -> None:
        """``limit_bytes``: of host memory for this device; None: what the host has free."""
        self.device = torch.device(device)
        self.blocks = HostBlocks(pinned=self.device.type == "cuda", limit_bytes=limit_bytes)
        self.num_copied_bytes = 0
        """Bytes copied to the host so far, and as many back."""
        is_gpu = self.device.type == "cuda"
        self.outward: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if is_gpu else None
        self.inward: torch.cuda.Stream | None = torch.cuda.Stream(self.device) if is_gpu else None
        self._leaving: OffloadedLayer | None = None

    def micro_batch(self) -> "OffloadedForward":
        """What moves the saved tensors of one micro-batch."""
        return OffloadedForward(self)

    def release(self) -> None:
        """Between steps: free host memory beyond what the step needed at once."""
        self.let_go(unless=None)
        self.blocks.trim()

    def let_go(self, *, unless: "OffloadedLayer | None") -> None:
        """Free the device's copy of the layer that is being copied; computing waits until the copy is there."""
        if self._leaving is not None and self._leaving is not unless:
            for copy in self._leaving.copies():
                copy.let_go()
        self._leaving = None

    def leave(self, layer: "OffloadedLayer | None") -> None:
        """Note that the forward of ``layer`` (None: of one that stays) is over: the layer before it may go now."""
        self.let_go(unless=layer)
        self._leaving = layer if self.outward is not None else None


class OffloadedForward:
    """The layers of one micro-batch, in the order of their forwards, and where their saved tensors are."""

    def __init__(self, host: HostOffload) -> None:
        self._host = host
        self._last: OffloadedLayer | None = None

    @contextmanager
    def layer(self, keep: Keep | None) -> "Iterator[OffloadedLayer | None]":
        """Within, saved tensors of a layer go to the host but for those that ``keep`` says; None: all stay.

        Tensors that are not of floating point (offsets, indices), scalars and those of another device stay anyway.

        Raises:
            HostMemoryError: the host has no room for them.
        """
        if keep is None:
            yield None
            self._host.leave(None)
            return
        layer = OffloadedLayer(self._host, keep, before=self._last)
        with torch.autograd.graph.saved_tensors_hooks(layer.pack, unpack):
            yield layer
        layer.finish_forward()
        self._last = layer
        self._host.leave(layer)


class OffloadedLayer:
    """The saved tensors of one layer of one micro-batch."""

    def __init__(self, host: HostOffload, keep: Keep, *, before: "OffloadedLayer | None") -> None:
        self._host, self._keep, self._before = host, keep, before
        self._copies: list[weakref.ref[StorageCopy]] = []
        self._by_storage: dict[tuple[int, torch.dtype, int], list[_Copied]] = {}
        self._is_backward = False

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of ``tensor``. One storage that is saved twice is copied once, unless parts of
        it may have been written in between.
        """
        is_other = tensor.device.type != self._host.device.type or not tensor.is_floating_point() or not tensor.ndim
        if is_other or self._keep(tensor):
            return tensor if tensor.grad_fn is None else tensor.detach()
        saved, storage = tensor.detach(), tensor.untyped_storage()
        copies = self._by_storage.setdefault((storage._cdata, tensor.dtype, tensor._version), [])
        copied = next((copied for copied in copies if copied.has(tensor)), None)
        if copied is None:
            numbers = saved.as_strided((storage.nbytes() // saved.element_size(),), (1,), 0)
            copied = _Copied(tensor, StorageCopy(numbers, self._host))
            copies.append(copied)
            self._copies.append(weakref.ref(copied.copy))
        return SavedView(self, copied.copy, saved.shape, saved.stride(), saved.storage_offset())

    def finish_forward(self) -> None:
        """Nothing more of this layer is saved."""
        self._by_storage.clear()

    def copies(self) -> list["StorageCopy"]:
        """The storages that a backward still needs."""
        return [copy for reference in self._copies if (copy := reference()) is not None]

    def begin_backward(self) -> None:
        """Have this layer's tensors brought back, and those of the layer before, whose backward comes next."""
        if self._is_backward:
            return
        self._is_backward = True
        self._host.let_go(unless=self)
        for layer in (self, self._before):
            for copy in [] if layer is None else layer.copies():
                copy.fetch()


class _Copied:
    """What is known of a copy of a storage that was made to save one tensor.

    That tensor is not written any more, nor what is a view of the same tensor at the same version; other parts of the
    storage may be, as the gates of an LSTM are, each with versions of its own.
    """

    def __init__(self, tensor: Tensor, copy: "StorageCopy") -> None:
        self.copy = copy
        self._storage = StorageWeakRef(tensor.untyped_storage())
        """An address is not used twice while it is referred to."""
        self._base = TensorWeakRef(_base_of(tensor))
        self._begin, self._end = _span(tensor)
        self._is_dense = self._end - self._begin == tensor.numel()

    def has(self, tensor: Tensor) -> bool:
        """Whether the copy has the numbers of another tensor, of the same storage and version."""
        if self._base() is _base_of(tensor):
            return True
        begin, end = _span(tensor)
        return self._is_dense and self._begin <= begin and end <= self._end


def _base_of(tensor: Tensor) -> Tensor:
    """The tensor that a tensor is a view of, or itself: writes to one count as versions of the other."""
    return tensor if tensor._base is None else tensor._base


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first number of a tensor in its storage, and the one after its last."""
    begin = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (reach + 1 if tensor.numel() else 0)


@dataclass(frozen=True, eq=False)
class SavedView:
    """A saved tensor: a view of a storage whose numbers are in host memory."""

    layer: OffloadedLayer
    storage: "StorageCopy"
    shape: torch.Size
    stride: Sequence[int]
    offset: int | torch.SymInt


def unpack(saved: Any) -> Any:
    """The tensor that :meth:`OffloadedLayer.pack` was given, on the device."""
    if not isinstance(saved, SavedView):
        return saved
    saved.layer.begin_backward()
    return saved.storage.on_device().as_strided(saved.shape, saved.stride, saved.offset)


class StorageCopy:
    """One storage of the device in host memory, and on the device while it is copied or used."""

    def __init__(self, whole: Tensor, host: HostOffload) -> None:
        """``whole``: all numbers of the storage; they are copied from now on."""
        self._host, self._size, self._dtype = host, len(whole), whole.dtype
        self._whole: Tensor | None = whole
        self._is_leaving = True
        self._come: torch.cuda.Event | None = None
        numbers = whole.view(torch.uint8)
        self._leases = host.blocks.take(len(numbers))
        host.num_copied_bytes += len(numbers)
        self._gone = _after(host.outward, host.device, partial(self._copy_out, numbers))
        if host.outward is None:
            self._whole = None

    def let_go(self) -> None:
        """Free the device's storage, unless it is in use again; computing goes on once the copy is there."""
        if self._is_leaving and self._whole is not None:
            _wait_for(self._gone, self._host.device)
            self._whole = None

    def fetch(self) -> None:
        """Have the numbers on the device again, unless they are or will be."""
        self._is_leaving = False
        if self._whole is None:
            self._whole = torch.empty(self._size, dtype=self._dtype, device=self._host.device)
            copy = partial(self._copy_in, self._whole.view(torch.uint8))
            self._come = _after(self._host.inward, self._host.device, copy)
            for lease in self._leases:
                lease.block.last_read = self._come

    def on_device(self) -> Tensor:
        """All numbers of the storage."""
        self.fetch()
        _wait_for(self._come, self._host.device)
        assert self._whole is not None
        return self._whole

    def _copy_out(self, numbers: Tensor) -> None:
        for lease, part in zip(self._leases, numbers.split([lease.size for lease in self._leases])):
            if lease.block.last_read is not None and self._host.outward is not None:
                self._host.outward.wait_event(lease.block.last_read)
            lease.memory.copy_(part, non_blocking=True)

    def _copy_in(self, numbers: Tensor) -> None:
        if self._gone is not None and self._host.inward is not None:
            self._host.inward.wait_event(self._gone)
        for lease, part in zip(self._leases, numbers.split([lease.size for lease in self._leases])):
            part.copy_(lease.memory, non_blocking=True)


def _after(stream: torch.cuda.Stream | None, device: torch.device, copy: Callable[[], None]) -> torch.cuda.Event | None:
    """Copy on ``stream`` after all that computing was given so far; the event of the end. Without a stream, now."""
    if stream is None:
        copy()
        return None
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy()
        return stream.record_event()


def _wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Have computing, not the host, wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
