"""What of ``torch.cuda`` a step touches, on a device that is not there. Changes torch for the whole process."""

from importlib import import_module
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lengthwise.runtime.comm import host_memory
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.dryrun.recorder import Recorder

_recorders: list[Recorder] = []


def install() -> None:
    """Replace streams, events and pinned memory; register what keeps fused kernels whole."""
    cuda: Any = torch.cuda
    cuda._lazy_init, cuda.is_available = lambda: None, lambda: True
    cuda.Stream = cuda.streams.Stream = FakeStream
    cuda.Event = cuda.streams.Event = FakeEvent
    kernels = FakeStream()
    cuda.current_stream = cuda.default_stream = lambda device=None: kernels
    cuda.stream = lambda stream: stream
    cuda.synchronize = lambda device=None: _synchronise("torch.cuda.synchronize")
    cuda.set_device, cuda.get_device_capability = lambda device: None, lambda device=None: (9, 0)
    cuda.memory_allocated = lambda device=None: _recorders[-1].memory.total if _recorders else 0
    cuda.reset_peak_memory_stats = lambda device=None: _recorders[-1].memory.restart_highest()
    cuda.max_memory_allocated = lambda device=None: _recorders[-1].memory.highest_total
    cast(Any, torch.UntypedStorage).resize_ = _resize_storage
    tensor, fake_tensor, optimizer = cast(Any, Tensor), cast(Any, FakeTensor), import_module("torch.optim.optimizer")
    tensor.pin_memory, tensor.is_pinned, fake_tensor.tolist = _pin_memory, _is_pinned, _tolist
    optimizer._foreach_supported_types.append(FakeTensor)  # as AdamW treats parameters on a GPU
    cast(Any, FakeTensorMode).avoid_device_init = True  # tensors of the device come from tensors of the host
    aten_overrides = torch.library.Library("aten", "IMPL")
    for name in ("_fused_rms_norm", "silu_backward"):
        aten_overrides.impl(name, lambda *args: None, "CUDA")  # never called: it keeps torch from taking them apart
    _registrations.append(aten_overrides)
    cast(Any, AsyncResult).is_done = property(_is_done)
    cast(Any, host_memory).host_empty = cast(Any, host_memory).pinned_empty = _host_empty


UNDER_WAY = 1
"""How often a transfer is still under way when it is asked for: beneath the layer or the pass after its own."""


def _is_done(transfer: AsyncResult) -> bool:
    """Whether a transfer is over, which no fake one ever is."""
    state = vars(transfer)
    state["times_asked"] = state.get("times_asked", 0) + 1
    return state["times_asked"] > UNDER_WAY


_registrations: list[Any] = []
"""Keeps overrides of ``aten`` in place: they last as long as the object that registered them."""


def record_with(recorder: Recorder) -> None:
    """Have synchronisations and pinned memory noted by ``recorder`` from now on."""
    _recorders[:] = [recorder]


def _synchronise(reason: str) -> None:
    if _recorders:
        _recorders[-1].synchronise(reason)


_stream_numbers = count()


class FakeStream:
    """A stream on which nothing ever runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream, self.device = next(_stream_numbers), torch.device("cuda", 0)
        self._outer = 0

    def synchronize(self) -> None:
        """Note that the host waits."""
        _synchronise("synchronize of a stream")

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: work of one stream waits for another's, the host does not."""

    def wait_event(self, event: Any) -> None:
        """Do nothing, as :meth:`wait_stream`."""

    def record_event(self, event: Any = None) -> Any:
        """An event of this stream."""
        return event or FakeEvent()

    def __enter__(self) -> "FakeStream":
        if _recorders:
            self._outer, _recorders[-1].stream = _recorders[-1].stream, self.cuda_stream
        return self

    def __exit__(self, *error: object) -> None:
        if _recorders:
            _recorders[-1].stream = self._outer


class FakeEvent:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing: the event has happened."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def synchronize(self) -> None:
        """Note that the host waits."""
        _synchronise("synchronize of an event")

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another event: none."""
        return 0.0


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    with unset_fake_temporarily():
        pinned = tensor.clone()
    if _recorders:
        _recorders[-1].pinned.add(pinned.untyped_storage().data_ptr())
    return pinned


_resize = torch.UntypedStorage.resize_


def _resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    _resize(storage, num_bytes)
    if _recorders:
        _recorders[-1].memory.resize(storage, _recorders[-1].operation)
    return storage


def _host_empty(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of the host without its numbers: a state there may be larger than this machine."""
    with unset_fake_temporarily():
        nothing = torch.empty(shape, dtype=dtype, device="meta")
    return _recorders[-1].on_host(nothing)


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return bool(_recorders) and tensor.untyped_storage().data_ptr() in _recorders[-1].pinned


def _tolist(tensor: Tensor) -> Any:
    """One copy to the host, as on a GPU, instead of one for every number."""
    on_host = tensor.cpu()
    with unset_fake_temporarily():
        return on_host.tolist()
