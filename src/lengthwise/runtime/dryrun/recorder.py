"""Records what a rank asks of its device: kernels, FLOPs, collectives, synchronisations, and bytes.

Tensors of the host are real, those of the device are fake: a value that the host reads from the device is a
synchronisation, and is 1 here.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lengthwise.core.errors import InputError
from lengthwise.runtime.dryrun import attention_kernels
from lengthwise.runtime.dryrun.collective_log import IssuedCollective, issued
from lengthwise.runtime.dryrun.device_memory import DeviceMemory, bytes_of, is_on_device
from lengthwise.runtime.dryrun.stream_order import HOST, StreamOrder, StreamPoint
from lengthwise.runtime.dryrun.tensor_accesses import TensorAccesses, stream_key

PACKAGE = Path(__file__).parents[2]
HERE, TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
aten = torch.ops.aten
_COMPARISONS = (aten.equal.default, aten.allclose.default)
"""Whose result the host reads; on fake tensors they find what they compare to be equal."""
_WITHOUT_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "resize_", "set_", "lift_fresh", "view",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Everything that goes to the device while it is active, within a ``FakeTensorMode``."""

    def __init__(self, rank: int, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._rank, self._fakes = rank, fakes
        self.start_s = time.perf_counter()
        self.memory = DeviceMemory()
        self.operation = ""
        """What the rank is doing, such as ``forward 0``."""
        self.stream = 0
        """The number of the stream that is given work; 0: that of kernels."""
        self.pinned: set[int] = set()
        """Data pointers of pinned memory of the host."""
        self.order = StreamOrder(place=line_of_code)
        self._accesses = TensorAccesses(self.order)
        self._unwaited: list[StreamPoint] = []
        self.restart()

    def restart(self) -> None:
        """Forget all but what is allocated."""
        self.kernels: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.collectives: list[IssuedCollective] = []
        self.synchronisations: Counter[tuple[str, str]] = Counter()
        """Line of code and reason, and how often."""
        self.copies: Counter[tuple[str, str]] = Counter()
        """Copies to the device that the host does not wait for."""
        self.host_copies: Counter[tuple[str, int]] = Counter()
        """Bytes of those copies and of those to pinned memory, by direction and number of the stream."""
        self.memory.restart()
        self.order.restart()

    def take_unwaited(self) -> list[StreamPoint]:
        """Where exchanges end that were begun since the last call and not waited for at once."""
        points, self._unwaited = self._unwaited, []
        return points

    def on_host(self, shape: Tensor) -> Tensor:
        """A tensor of the host that has the shape and dtype of a meta tensor, and no numbers."""
        return FakeTensor(self._fakes, shape, torch.device("cpu"))

    def synchronise(self, reason: str) -> None:
        """Note that the host waits for the device."""
        self.synchronisations[line_of_code(), reason] += 1
        self.order.wait(HOST, self.order.point(stream_key(self.stream)))

    def _issue(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, *, on_host: bool = False) -> None:
        """Record a kernel, or what the host computes itself, in the order of its stream."""
        stream = HOST if on_host else stream_key(self.stream)
        accesses = self._accesses.of_call(func, args, kwargs, out)
        self.order.issue(stream, name, accesses, operation=self.operation)

    def _exchange(self, func: Any, name: str, args: Any) -> None:
        """Record a collective, which runs on the stream of its group when what was issued before it is over."""
        collective = issued(name, args, self.operation, self._rank)
        self.collectives.append(collective)
        stream, current = self._accesses.stream_of(args, collective.ranks), stream_key(self.stream)
        self.order.wait(stream, self.order.point(current))
        accesses = self._accesses.of_exchange(name, args)
        self.order.issue(stream, collective.kind, accesses, operation=self.operation, num_bytes=collective.num_bytes)
        if self._accesses.is_async(func, args):
            self._unwaited.append(self.order.point(stream))
        else:
            self.order.wait(current, self.order.point(stream))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        if not any(map(is_on_device, tensors)) and (device is None or torch.device(device).type in ("cpu", "meta")):
            if any(isinstance(tensor, FakeTensor) for tensor in tensors):
                name, args = func._schema.name.partition("::")[2], self._as_fake(list(args))
                out = self._run(func, name, args, kwargs)
                if name not in _WITHOUT_KERNEL and not func.is_view:
                    self._issue(func, name, args, kwargs, out, on_host=True)
                return out
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self._exchange(func, name, args)
            if name == "_allgather_base_":  # every rank is taken to say what this one says
                attention_kernels.carry(args[1], args[0], copies=args[0].numel() // max(1, args[1].numel()))
            return func(*args, **kwargs)
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs, device)
        self._check_host_reads(func, name, args, tensors)
        args = [self._as_fake(arg) for arg in args]
        out = self._run(func, name, args, kwargs)
        if name == "view":
            attention_kernels.carry(args[0], out)
        for tensor in _tensors((out,)):
            if is_on_device(tensor):
                self.memory.allocate(tensor, f"{self.operation}, {name}")
        if name not in _WITHOUT_KERNEL and not func.is_view:
            self.kernels[name] += 1
            self._count_flops(func, args, kwargs, out)  # after its results, beside which a kernel has its workspace
            self._issue(func, name, args, kwargs, out)
        return out

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else args[0].dtype == torch.bool or 1
        if func in _COMPARISONS:
            return True
        if func is aten._fused_rms_norm.default:
            x, shape = args[:2]
            rows = x.shape[: x.ndim - len(shape)]
            return torch.empty_like(x), x.new_empty((*rows, *[1] * len(shape)), dtype=torch.float32)
        if func is aten._fused_rms_norm_backward.default:
            return torch.empty_like(args[1]), None if args[4] is None else torch.empty_like(args[4])
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException:
            self.synchronise(f"the shape of {name} depends on values")
            if name == "nonzero":
                return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
            if name == "masked_select":
                return args[0].new_empty((args[0].numel(),))
            raise InputError(
                f"{line_of_code()}: the shape of {name} depends on values, which a dry run does not have; use an "
                "operation whose shape is known"
            ) from None

    def _as_fake(self, value: Any) -> Any:
        """A fake tensor in place of one of the host, also within lists."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._as_fake, value))
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self._fakes.from_tensor(value) if is_real else value

    def _copy(self, func: Any, args: Any, kwargs: Any, device: Any) -> Any:
        """A copy between host and device, or within one."""
        source = args[0] if func is aten._to_copy.default else args[1]
        target_is_host = (
            not is_on_device(args[0])
            if func is aten.copy_.default
            else (device is not None and torch.device(device).type == "cpu")
        )
        is_async = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if target_is_host and is_async and isinstance(args[0], FakeTensor) and func is aten.copy_.default:
            self.copies[line_of_code(), "copy to pinned memory"] += 1
            self.host_copies["to the host", self.stream] += bytes_of(source)
            self._issue_copy("copy to the host", source, args[0])
            return args[0]
        if target_is_host:
            self._issue_copy("copy to the host", source, None)
            self.synchronise("copy to the host")
            if isinstance(args[0], FakeTensor) and func is aten.copy_.default:
                return args[0]
            with unset_fake_temporarily():
                if func is aten.copy_.default:
                    return args[0].fill_(1)
                values = attention_kernels.values_of(source)
                if values is not None:
                    return torch.from_numpy(values.reshape(source.shape).copy())
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        is_from_host, waits = not is_on_device(source) and source.ndim > 0, False
        if is_from_host:
            is_pinned = isinstance(source, FakeTensor) or source.untyped_storage().data_ptr() in self.pinned
            waits = not is_async or not is_pinned
            if waits:
                self.synchronise("copy of pageable memory to the device" if not is_pinned else "copy that waits")
            else:
                self.copies[line_of_code(), "copy of pinned memory to the device"] += 1
                self.host_copies["to the device", self.stream] += bytes_of(source)
        self.kernels["copy"] += 1
        if is_on_device(source):
            out = func(*args, **kwargs)
        elif func is aten.copy_.default:
            out = args[0]
        else:
            out = torch.empty_strided(
                source.shape, source.stride(), dtype=kwargs.get("dtype") or source.dtype, device=device
            )
            if not source.is_floating_point():
                with unset_fake_temporarily():
                    attention_kernels.remember(out, source.numpy())
        self.memory.allocate(out, f"{self.operation}, copy")
        self._issue_copy("copy to the device" if is_from_host else "copy", source, out)
        if waits:
            self.order.wait(HOST, self.order.point(stream_key(self.stream)))
        return out

    def _issue_copy(self, kind: str, source: Tensor, target: Tensor | None) -> None:
        self.order.issue(
            stream_key(self.stream), kind, self._accesses.of_copy(source, target), operation=self.operation,
            num_bytes=bytes_of(source),
        )  # fmt: skip

    def _check_host_reads(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        if func in (aten._local_scalar_dense.default, *_COMPARISONS):
            self.synchronise("the host reads a value")
        elif name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.synchronise(f"{name} by a mask")
        elif any(not isinstance(tensor, FakeTensor) and tensor.ndim for tensor in tensors):
            self.synchronise(f"{name} with a tensor of the host")

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kernel = attention_kernels.read(func, args, kwargs)
        if kernel is not None:
            self.flops["attention"] += kernel.flops
            self.memory.hold_briefly(
                kernel.workspace_bytes, f"{self.operation}, {func._schema.name.partition('::')[2]}"
            )
        elif (count := flop_registry.get(out_of_place(func))) is not None:
            self.flops["products"] += count(*args, **kwargs, out_val=out)


def out_of_place(func: Any) -> Any:
    """The operation that computes what ``func`` does, which may write it in place: ``addmm`` of ``addmm_``."""
    packet = func._overloadpacket
    return getattr(aten, packet.__name__.removesuffix("_"), packet) if func.namespace == "aten" else packet


def line_of_code() -> str:
    """The innermost line of this package, or else outside of torch, that led here; ``file:line in function``."""
    frame: Any = sys._getframe(1)
    outside = "?"
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(HERE):
            place = f"{frame.f_lineno} in {frame.f_code.co_name}"
            if path.startswith(str(PACKAGE)):
                return f"{Path(path).relative_to(PACKAGE)}:{place}"
            if outside == "?" and not path.startswith((TORCH, "<")):
                outside = f"{path}:{place}"
        frame = frame.f_back
    return outside


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
