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


Moment = float | torch.cuda.Event
"""Seconds on the host's clock, or an event of the device."""


class StepClock:
    """Spans of one step. Ranks agree on its zero at the first collective of the step, which they leave together.

    On a GPU moments are events of its stream, so that spans hold what they name although the host runs ahead of the
    device; it waits for none of them before :meth:`timeline`.
    """

    def __init__(self, world: DistContext) -> None:
        self.world = world
        self._zero_s = self._start_s = time.perf_counter()
        self._start = self._now()
        self._spans: list[tuple[Moment, Moment, SpanKind, str]] = []
        self._open = (self._start, SpanKind.WAIT, "")
        self._memory: list[tuple[Moment, int]] = []

    @contextmanager
    def span(self, kind: SpanKind, name: str = "") -> Iterator[None]:
        """Time the block inside: of the device if it is a GPU, of the host otherwise."""
        self._open = (self._now(), kind, name)
        ACTIVITY.begin(name)
        yield
        self._close_span()

    @contextmanager
    def interruption(self, kind: SpanKind, name: str = "") -> Iterator[None]:
        """Time something else within a span, which goes on after it."""
        _, outer, outer_name = self._open
        self._close_span()
        with self.span(kind, name):
            yield
        self._open = (self._now(), outer, outer_name)
        ACTIVITY.begin(outer_name)

    def _now(self) -> Moment:
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Moment) -> float:
        """A moment on the host's clock; the device began the step with nothing to do."""
        if isinstance(moment, float):
            return moment
        assert not isinstance(self._start, float)
        return self._start_s + self._start.elapsed_time(moment) / 1e3

    def _close_span(self) -> None:
        start, kind, name = self._open
        self._spans.append((start, self._now(), kind, name))

    def since_start_s(self) -> float:
        """Seconds since this rank started the step."""
        return time.perf_counter() - self._start_s

    def align(self, longest_lead_s: float) -> None:
        """Set zero to when the first rank started: ``longest_lead_s`` before now, a moment all ranks share."""
        self._zero_s = time.perf_counter() - longest_lead_s

    def sample_memory(self, num_bytes: int) -> None:
        """Note the bytes in use now."""
        self._memory.append((self._now(), num_bytes))

    def timeline(self, step: int) -> Timeline:
        """Timeline of what this rank recorded; waits for the device to have done it."""
        rank, zero_s, last = self.world.rank, self._zero_s, self._now()
        if not isinstance(last, float):
            last.synchronize()
        return Timeline(
            step=step,
            num_ranks=self.world.size,
            spans=tuple(
                Span(
                    start_s=self._seconds(start) - zero_s,
                    end_s=self._seconds(end) - zero_s,
                    rank=rank,
                    kind=kind,
                    name=name,
                )
                for start, end, kind, name in self._spans
            ),
            memory=tuple(
                MemorySample(time_s=self._seconds(sampled) - zero_s, rank=rank, num_bytes=size)
                for sampled, size in self._memory
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
