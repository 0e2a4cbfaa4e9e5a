"""Which errors mean that a device ran out of memory, and where in a step that happened."""

from dataclasses import dataclass

import torch

MOST_ATTEMPTS = 10
"""How often a step is planned again because a rank ran out of memory."""
_OF_CPU = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator")


@dataclass(frozen=True, kw_only=True)
class MicroBatchFailure:
    """The place of a micro-batch that ran out of memory."""

    rank: int
    pipeline: int
    micro_batch: int
    on_host: bool = False
    """Whether it was the host's memory, for activations that are offloaded, not the device's."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_CPU)
