"""What of ``torch.cuda`` a step touches, on a device that is not there. Changes torch for the whole process."""

from collections.abc import Hashable
from importlib import import_module
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lengthwise.runtime.comm import host_memory
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.dryrun.recorder import Recorder
from lengthwise.runtime.dryrun.stream_order import HOST, StreamPoint
from lengthwise.runtime.dryrun.tensor_accesses import stream_key

_recorders: list[Recorder] = []


def install() -> None:
    """Replace streams, events and pinned memory; register what keeps fused kernels whole."""
    cuda: Any = torch.cuda
    cuda._lazy_init, cuda.is_available = lambda: None, lambda: True
    cuda.Stream = cuda.streams.Stream = FakeStream
    cuda.Event = cuda.streams.Event = FakeEvent
    kernels = FakeStream()
    cuda.default_stream = lambda device=None: kernels
    cuda.current_stream = lambda device=None: _entered[-1] if _entered else kernels
    cuda.stream = lambda stream: stream
    cuda.synchronize = lambda device=None: _wait_for_all()
    cuda.set_device, cuda.get_device_capability = lambda device: None, lambda device=None: (9, 0)
    cuda.memory_allocated = lambda device=None: _recorders[-1].memory.total if _recorders else 0
    cuda.reset_peak_memory_stats = lambda device=None: _recorders[-1].memory.restart_highest()
    cuda.max_memory_allocated = lambda device=None: _recorders[-1].memory.highest_total
    cuda.get_rng_state, cuda.set_rng_state = lambda *device: torch.zeros(1), lambda *state: None
    cuda.manual_seed_all = lambda seed: None
    cast(Any, torch.UntypedStorage).resize_ = _resize_storage
    tensor, fake_tensor, optimizer = cast(Any, Tensor), cast(Any, FakeTensor), import_module("torch.optim.optimizer")
    tensor.pin_memory, tensor.is_pinned, fake_tensor.tolist = _pin_memory, _is_pinned, _tolist
    fake_tensor.__getitem__ = _get_item
    optimizer._foreach_supported_types.append(FakeTensor)  # as AdamW treats parameters on a GPU
    cast(Any, FakeTensorMode).avoid_device_init = True  # tensors of the device come from tensors of the host
    aten_overrides = torch.library.Library("aten", "IMPL")
    for name in ("_fused_rms_norm", "silu_backward"):
        aten_overrides.impl(name, lambda *args: None, "CUDA")  # never called: it keeps torch from taking them apart
    _registrations.append(aten_overrides)
    transfers = cast(Any, AsyncResult)
    transfers.__init__, transfers.wait, transfers.is_done = _begin_transfer, _wait_for_transfer, property(_is_done)
    cast(Any, host_memory).host_empty = cast(Any, host_memory).pinned_empty = _host_empty


UNDER_WAY = 1
"""How often a transfer is still under way when it is asked for: beneath the layer or the pass after its own."""


def _is_done(transfer: AsyncResult) -> bool:
    """Whether a transfer is over, which no fake one ever is."""
    state = vars(transfer)
    state["times_asked"] = state.get("times_asked", 0) + 1
    is_done: bool = state["times_asked"] > UNDER_WAY
    for point in state.get("ends", ()) if is_done else ():
        _wait(HOST, point)
    return is_done


_make_transfer, _finish_transfer = AsyncResult.__init__, AsyncResult.wait


def _begin_transfer(transfer: AsyncResult, make: Any, works: Any = (), *others: Any, **named: Any) -> None:
    _make_transfer(transfer, make, works, *others, **named)
    vars(transfer)["ends"] = _recorders[-1].take_unwaited() if works and _recorders else []


def _wait_for_transfer(transfer: AsyncResult) -> Tensor:
    for point in vars(transfer).get("ends", ()):
        _wait(stream_key(_recorders[-1].stream), point)
    return _finish_transfer(transfer)


_registrations: list[Any] = []
"""Keeps overrides of ``aten`` in place: they last as long as the object that registered them."""


def record_with(recorder: Recorder) -> None:
    """Have synchronisations and pinned memory noted by ``recorder`` from now on."""
    _recorders[:] = [recorder]


def _synchronise(reason: str) -> None:
    if _recorders:
        _recorders[-1].synchronise(reason)


def _wait_for_all() -> None:
    _synchronise("torch.cuda.synchronize")
    for recorder in _recorders:
        recorder.order.wait_for_all(HOST)


_stream_numbers = count()
_entered: list["FakeStream"] = []
"""Streams whose ``with`` is being run, the innermost last."""


class FakeStream:
    """A stream on which nothing ever runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream, self.device = next(_stream_numbers), torch.device("cuda", 0)
        self._outer = 0

    @property
    def key(self) -> Hashable:
        """What the order of streams knows it as."""
        return stream_key(self.cuda_stream)

    def synchronize(self) -> None:
        """Note that the host waits."""
        _synchronise("synchronize of a stream")
        _wait(HOST, _point_of(self))

    def wait_stream(self, stream: Any) -> None:
        """Note that work of this stream waits for that of another, which the host does not."""
        _wait(self.key, _point_of(stream))

    def wait_event(self, event: Any) -> None:
        """Note that work of this stream waits for an event."""
        _wait(self.key, event.point)

    def record_event(self, event: Any = None) -> Any:
        """An event of this stream."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def __enter__(self) -> "FakeStream":
        _entered.append(self)
        if _recorders:
            self._outer, _recorders[-1].stream = _recorders[-1].stream, self.cuda_stream
        return self

    def __exit__(self, *error: object) -> None:
        _entered.pop()
        if _recorders:
            _recorders[-1].stream = self._outer


class FakeEvent:
    """An event that knows what is over once it happens; to the host it has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.point: StreamPoint = StreamPoint(HOST, {})

    def record(self, stream: Any = None) -> None:
        """Let the event happen when what was issued to a stream is over."""
        self.point = _point_of(stream or torch.cuda.current_stream())

    def wait(self, stream: Any = None) -> None:
        """Note that work of a stream waits for the event."""
        cast(Any, stream or torch.cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether it has happened."""
        _wait(HOST, self.point)
        return True

    def synchronize(self) -> None:
        """Note that the host waits."""
        _synchronise("synchronize of an event")
        _wait(HOST, self.point)

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another event: none."""
        return 0.0


def _point_of(stream: Any) -> StreamPoint:
    return _recorders[-1].order.point(stream.key) if _recorders else StreamPoint(HOST, {})


def _wait(key: Hashable, point: StreamPoint) -> None:
    if _recorders:
        _recorders[-1].order.wait(key, point)


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


def _get_item(tensor: Tensor, index: Any) -> Tensor:
    """Index by tensors in place of lists, which torch would copy to the device beneath what fakes it."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    item: Tensor = Tensor.__getitem__(tensor, parts if isinstance(index, tuple) else parts[0])
    return item


def _tolist(tensor: Tensor) -> Any:
    """One copy to the host, as on a GPU, instead of one for every number."""
    on_host = tensor.cpu()
    with unset_fake_temporarily():
        return on_host.tolist()
