"""Bytes of a fake device by kind: every storage from allocation to release, in the order of the host's calls."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

BLOCK_BYTES = 512
"""Torch's CUDA allocator rounds every allocation up to a multiple of this."""
SAMPLES = 400
"""Most samples of a rank's memory over time."""


class MemoryKind(StrEnum):
    """What bytes are for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """Master weights, their summed gradients and what the optimizer keeps."""
    ACTIVATIONS = "activations"
    """Saved by a forward for its backward."""
    TEMPORARY = "temporary"


Usage = dict[MemoryKind, int]


@dataclass(eq=False)
class DeviceMemory:
    """Live bytes of a device by kind, their peak, and samples over time. Knows no fragmentation."""

    usage: Usage = field(default_factory=lambda: dict.fromkeys(MemoryKind, 0))
    peak: Usage = field(default_factory=lambda: dict.fromkeys(MemoryKind, 0))
    peak_at: str = ""
    """The operation and the kernel at the peak."""
    largest: tuple[int, str] = (0, "")
    """The most numbers in a newly allocated tensor, and where."""
    samples: list[tuple[str, Usage]] = field(default_factory=list)
    """Operation and highest bytes of every so many allocations."""
    total: int = 0
    highest_total: int = 0
    """The most bytes since :meth:`restart_highest`."""
    _peak_total: int = 0
    _storages: dict[int, tuple[int, MemoryKind]] = field(default_factory=dict)
    _stride: int = 1
    _changes: int = 0
    _highest: tuple[int, str, Usage] | None = None

    def allocate(self, tensor: Tensor, place: str) -> None:
        """Count the storage of a tensor, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = _in_blocks(storage)
        self._storages[key] = (num_bytes, MemoryKind.TEMPORARY)
        weakref.finalize(storage, self._release, key)
        self._add(MemoryKind.TEMPORARY, num_bytes)
        self._note(place)
        self.largest = max(self.largest, (storage.nbytes() // tensor.element_size(), place))

    def resize(self, storage: torch.UntypedStorage, place: str) -> None:
        """Count the bytes of a storage anew: of weights, which are freed while their tensor stays, and come again."""
        if storage._cdata in self._storages:
            before, kind = self._storages[storage._cdata]
            self._add(kind, -before)
            self._storages[storage._cdata] = (_in_blocks(storage), MemoryKind.WEIGHTS)
            self._add(MemoryKind.WEIGHTS, _in_blocks(storage))
            self._note(place)

    def label(self, tensors: Iterable[Tensor], kind: MemoryKind) -> None:
        """Say what the storages of ``tensors`` are for."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            num_bytes, before = self._storages.get(key, (0, kind))
            if key in self._storages and before is not kind:
                self._storages[key] = (num_bytes, kind)
                self.usage[before] -= num_bytes
                self.usage[kind] += num_bytes

    def keep(self, tensor: Tensor) -> None:
        """Note that a forward saves a tensor for its backward."""
        if self._storages.get(tensor.untyped_storage()._cdata, (0, None))[1] is MemoryKind.TEMPORARY:
            self.label([tensor], MemoryKind.ACTIVATIONS)

    def hold_briefly(self, num_bytes: int, place: str) -> None:
        """Count what a kernel allocates and frees itself."""
        self._add(MemoryKind.TEMPORARY, num_bytes)
        self._note(place)
        self._add(MemoryKind.TEMPORARY, -num_bytes)

    def restart(self) -> None:
        """Forget peak and samples; what is allocated stays."""
        self.samples, self._stride, self._changes, self._highest, self.largest = [], 1, 0, None, (0, "")
        self.peak, self._peak_total, self.peak_at = dict(self.usage), self.total, ""

    def restart_highest(self) -> None:
        """Begin anew to look for the most bytes."""
        self.highest_total = self.total

    def _release(self, key: int) -> None:
        num_bytes, kind = self._storages.pop(key)
        self._add(kind, -num_bytes)

    def _add(self, kind: MemoryKind, num_bytes: int) -> None:
        self.usage[kind] += num_bytes
        self.total += num_bytes
        self.highest_total = max(self.highest_total, self.total)

    def _note(self, place: str) -> None:
        if self.total > self._peak_total:
            self.peak, self._peak_total, self.peak_at = dict(self.usage), self.total, place
        if self._highest is None or self.total > self._highest[0]:
            self._highest = self.total, place, dict(self.usage)
        self._changes += 1
        if self._changes % self._stride == 0:
            self.samples.append(self._highest[1:])
            self._highest = None
            if len(self.samples) == 2 * SAMPLES:  # every other one goes: the higher of two neighbours stays
                pairs = zip(self.samples[::2], self.samples[1::2])
                self.samples = [max(pair, key=lambda sample: sum(sample[1].values())) for pair in pairs]
                self._stride *= 2


def _in_blocks(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the numbers of a tensor."""
    return tensor.numel() * tensor.element_size()


def is_on_device(tensor: object) -> bool:
    """Whether this is a fake tensor of the device."""
    return isinstance(tensor, torch._subclasses.FakeTensor) and tensor.fake_device.type == "cuda"
