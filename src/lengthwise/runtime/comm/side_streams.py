"""Exchanges of several operations on a GPU, queued to their end on a stream beside that of kernels.

There are two such streams, used in turn. Buffers of an exchange belong to its stream, whose next exchange has them
again: however many are queued, two are in memory. A stream of its own for each would keep as many.
"""

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from lengthwise.runtime.comm.group import AsyncResult

_NUM_STREAMS = 2
_streams: dict[torch.device, "cycle[torch.cuda.Stream]"] = {}


def next_side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the next exchange."""
    if device not in _streams:
        _streams[device] = cycle([torch.cuda.Stream(device) for _ in range(_NUM_STREAMS)])
    return next(_streams[device])


class OnSideStream(AsyncResult):
    """A tensor that a side stream makes; whoever waits lets the current stream wait for it, and not the host."""

    def __init__(self, start: Callable[[], AsyncResult], device: torch.device) -> None:
        """``start``: issues it, with what it is made from; all memory that it takes is the side stream's."""
        stream = next_side_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._result = start().wait()
            self._event = stream.record_event()

    def wait(self) -> Tensor:
        """The tensor, for what is issued to the current stream from now on."""
        torch.cuda.current_stream().wait_event(self._event)
        return self._result

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        return bool(self._event.query())
