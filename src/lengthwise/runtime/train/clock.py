"""Records what a rank spends its time on, on a clock that all ranks of a step share."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.comm.world import DistContext

_STATM = Path("/proc/self/statm")


class StepClock:
    """Spans of one step. Ranks agree on its zero at the first collective of the step, which they leave together."""

    def __init__(self, world: DistContext) -> None:
        self.world = world
        self._zero_s = time.perf_counter()
        self._spans: list[tuple[float, float, SpanKind, str]] = []
        self._open = (self._zero_s, SpanKind.WAIT, "")
        self._memory: list[tuple[float, int]] = []

    @contextmanager
    def span(self, kind: SpanKind, name: str = "") -> Iterator[None]:
        """Time the block inside. On a GPU what is computed finishes first, so that spans hold what they name."""
        self._finish()
        self._open = (time.perf_counter(), kind, name)
        ACTIVITY.begin(name)
        yield
        self._finish()
        self._close_span()

    @contextmanager
    def interruption(self, kind: SpanKind, name: str = "") -> Iterator[None]:
        """Time something else within a span, which goes on after it."""
        _, outer, outer_name = self._open
        self._close_span()
        with self.span(kind, name):
            yield
        self._open = (time.perf_counter(), outer, outer_name)
        ACTIVITY.begin(outer_name)

    def _finish(self) -> None:
        """Wait for this rank's computation, and not for its communication.

        It shall be on its way while the rank computes; and the others may wait for what this rank does next.
        """
        if self.world.device.type == "cuda":
            torch.cuda.current_stream(self.world.device).synchronize()

    def _close_span(self) -> None:
        start_s, kind, name = self._open
        self._spans.append((start_s, time.perf_counter(), kind, name))

    def since_start_s(self) -> float:
        """Seconds since this rank started the step."""
        return time.perf_counter() - self._zero_s

    def align(self, longest_lead_s: float) -> None:
        """Set zero to when the first rank started: ``longest_lead_s`` before now, a moment all ranks share."""
        self._zero_s = time.perf_counter() - longest_lead_s

    def sample_memory(self, num_bytes: int) -> None:
        """Note the bytes in use now."""
        self._memory.append((time.perf_counter(), num_bytes))

    def timeline(self, step: int) -> Timeline:
        """Timeline of what this rank recorded."""
        rank, zero_s = self.world.rank, self._zero_s
        return Timeline(
            step=step,
            num_ranks=self.world.size,
            spans=tuple(
                Span(start_s=start - zero_s, end_s=end - zero_s, rank=rank, kind=kind, name=name)
                for start, end, kind, name in self._spans
            ),
            memory=tuple(
                MemorySample(time_s=sampled_s - zero_s, rank=rank, num_bytes=size) for sampled_s, size in self._memory
            ),
        )


def bytes_in_use(device: torch.device) -> int:
    """Bytes that this process holds: the allocator's on a GPU, resident memory on a CPU (its peak, outside Linux)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not _STATM.exists():
        return peak_bytes(device)
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device) -> int:
    """Most bytes this process ever held: reserved by the allocator on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
