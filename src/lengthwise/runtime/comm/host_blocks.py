"""Host memory in blocks of one size, pinned where the device is a GPU, that are used again and again.

What is put into them is of any size: it goes into the room that the last block has left, and on into others. So nothing
is lost to sizes that change from micro-batch to micro-batch, and no memory is pinned anew once a step has had its most.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.runtime.comm import host_memory

BLOCK_BYTES = {True: 1 << 26, False: 1 << 20}
"""By whether they are pinned: a GPU's link wants large copies; a CPU has no need of large blocks."""
ALIGNMENT = 512
RESERVE = 0.02
"""Share of the host's memory that is left to others."""


class HostMemoryError(MemoryError):
    """The host has no room for activations that a plan keeps there."""

    def __init__(self, message: str, num_bytes: int) -> None:
        """``num_bytes``: what was needed at least."""
        super().__init__(message)
        self.num_bytes = num_bytes


@dataclass(eq=False)
class Block:
    """One block of host memory."""

    memory: Tensor
    last_read: torch.cuda.Event | None = None
    """After which it may be written to again; None: at any time."""


@dataclass(eq=False)
class _Tenancy:
    """A block for as long as anybody has some of it."""

    block: Block


@dataclass(eq=False)
class Lease:
    """Some bytes of a block, until this is forgotten."""

    tenancy: _Tenancy
    memory: Tensor

    @property
    def block(self) -> Block:
        """The block that the bytes are of."""
        return self.tenancy.block

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.memory)


class HostBlocks:
    """Blocks of host memory, in use and free."""

    def __init__(self, *, pinned: bool, limit_bytes: int | None = None) -> None:
        """``limit_bytes``: most bytes of all blocks together; None: as many as the host has free."""
        self._pinned, self._limit_bytes = pinned, limit_bytes
        self.block_bytes = BLOCK_BYTES[pinned]
        self._free: list[Block] = []
        self._tenancy: _Tenancy | None = None
        self._filled = 0
        self.num_blocks = 0
        """In use or free."""
        self._fewest_free = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, in use or free."""
        return self.num_blocks * self.block_bytes

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the blocks that somebody has some of."""
        return (self.num_blocks - len(self._free)) * self.block_bytes

    def take(self, num_bytes: int) -> list[Lease]:
        """Room for ``num_bytes``, in one block or more.

        Raises:
            HostMemoryError: there is not so much.
        """
        leases = []
        while num_bytes:
            if self._tenancy is None or self._filled >= self.block_bytes:
                self._begin_block()
            assert self._tenancy is not None
            size = min(num_bytes, self.block_bytes - self._filled)
            leases.append(Lease(self._tenancy, self._tenancy.block.memory[self._filled : self._filled + size]))
            self._filled += -(-size // ALIGNMENT) * ALIGNMENT
            num_bytes -= size
        return leases

    def trim(self) -> None:
        """Free what was not needed since the last call."""
        self._tenancy = None
        for _ in range(min(self._fewest_free, len(self._free))):
            self._free.pop(0)
            self.num_blocks -= 1
        self._fewest_free = len(self._free)

    def _begin_block(self) -> None:
        self._tenancy = None  # goes back, if nothing in it is in use
        block = self._free.pop() if self._free else self._new_block()
        self._fewest_free = min(self._fewest_free, len(self._free))
        self._tenancy, self._filled = _Tenancy(block), 0
        weakref.finalize(self._tenancy, self._free.append, block).atexit = False

    def _new_block(self) -> Block:
        needed = self.num_bytes + self.block_bytes
        free_bytes, total_bytes = host_memory_bytes()
        reserve = RESERVE * total_bytes
        if self._limit_bytes is not None and needed > self._limit_bytes:
            raise _no_room(self.num_bytes, needed, f"which may take {self._limit_bytes / 2**30:.1f} GiB")
        if free_bytes - reserve < self.block_bytes:
            raise _no_room(self.num_bytes, needed, f"and the host has {free_bytes / 2**30:.1f} GiB left")
        try:
            if self._pinned:
                memory = host_memory.pinned_empty((self.block_bytes,), torch.uint8)
            else:
                memory = host_memory.host_empty(self.block_bytes, torch.uint8)
        except RuntimeError as error:
            raise _no_room(self.num_bytes, needed, "and the host gives no more") from error
        self.num_blocks += 1
        return Block(memory)


def _no_room(num_bytes: int, needed: int, limit: str) -> HostMemoryError:
    return HostMemoryError(
        f"activations in host memory take {num_bytes / 2**30:.1f} GiB and need more, {limit}; offload fewer layers, or "
        "recompute those that are offloaded",
        needed,
    )


def host_memory_bytes() -> tuple[float, float]:
    """Bytes of this host's memory that are free and that it has; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free, total = (1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return float("inf"), 0.0
    return free, total
