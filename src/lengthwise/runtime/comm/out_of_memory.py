"""Which errors mean that a device ran out of memory, and where in a step that happened."""

from dataclasses import dataclass

import torch

from lengthwise.core.errors import Setting

MOST_ATTEMPTS = 10
"""How often a step is planned again because a rank ran out of memory."""
_OF_CPU = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator")


@dataclass(frozen=True, kw_only=True)
class MicroBatchFailure:
    """The place of a micro-batch that ran out of memory."""

    rank: int
    pipeline: int
    micro_batch: int
    host_bytes: int = 0
    """Host memory that its offloaded activations needed at least, and the host did not have, in bytes; 0: it was the
    device's memory."""

    @property
    def text(self) -> str:
        """Which rank ran out of whose memory."""
        if not self.host_bytes:
            return f"rank {self.rank} ran out of memory"
        return (
            f"rank {self.rank} ran out of host memory (offloaded activations need at least "
            f"{self.host_bytes / 2**20:,.0f} MiB)"
        )

    @property
    def way_out(self) -> str:
        """What the user can change so that plans need less of it, with "or" at its end; nothing for a device's."""
        if not self.host_bytes:
            return ""
        return f"lower {Setting.HOST_MEMORY_GIB}, so that plans offload less, or "


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_CPU)
