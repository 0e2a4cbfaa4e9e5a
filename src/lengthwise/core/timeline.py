"""Timelines of a step: runtime and simulator write one type, so that measurement and prediction compare."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property


class SpanKind(StrEnum):
    """What a rank spends a span of time on."""

    PLAN = "plan"
    DATA = "data"
    COMPUTE = "compute"
    COMMUNICATE = "communicate"
    WAIT = "wait"
    UPDATE = "update"


PUSH = "push"
"""Name of the spans in which ranks sum their gradients: none ends before all have come."""


@dataclass(frozen=True, kw_only=True, order=True)
class Span:
    """[start_s, end_s) on one rank, in seconds from the start of the step."""

    start_s: float
    end_s: float
    rank: int
    kind: SpanKind
    name: str = ""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, order=True)
class MemorySample:
    """Bytes in use on one rank at one moment."""

    time_s: float
    rank: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of one step on all ranks."""

    step: int
    num_ranks: int
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()

    @cached_property
    def step_time_s(self) -> float:
        """Seconds until the last span of the last rank ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    def time_s(self, kind: SpanKind, rank: int | None = None) -> float:
        """Seconds spent on ``kind`` by one rank, or summed over all."""
        return sum(s.duration_s for s in self.spans if s.kind is kind and rank in (None, s.rank))

    @property
    def idle_fraction(self) -> float:
        """Share of the device-seconds of the step in which a rank waits or has no span at all."""
        total_s = self.step_time_s * self.num_ranks
        busy_s = sum(
            span.end_s - max(0.0, span.start_s)  # a plan made ahead may start before the step
            for span in self.spans
            if span.kind is not SpanKind.WAIT and span.end_s > 0.0
        )
        return max(0.0, 1.0 - busy_s / total_s) if total_s else 0.0

    @property
    def imbalance(self) -> float:
        """Compute time of the busiest rank over the mean of all ranks; 1 is perfect."""
        loads_s = [0.0] * self.num_ranks
        for span in self.spans:
            if span.kind is SpanKind.COMPUTE:
                loads_s[span.rank] += span.duration_s
        return max(loads_s) * self.num_ranks / sum(loads_s) if sum(loads_s) else 1.0

    def with_waits(self) -> "Timeline":
        """Mark the part of each push in which a rank only waits for slower ranks to arrive.

        A push cannot end before the last rank joins it. A rank measures only that it is inside the call; here, where
        all ranks are known, the call is cut at the last arrival.
        """
        pushes: dict[int, list[Span]] = {}
        for span in sorted(self.spans):
            if span.name == PUSH:
                pushes.setdefault(span.rank, []).append(span)
        arrivals: dict[Span, float] = {}
        for together in zip(*pushes.values()):
            arrivals |= dict.fromkeys(together, max(span.start_s for span in together))
        spans: list[Span] = []
        for span in self.spans:
            meet_s = min(arrivals.get(span, span.start_s), span.end_s)
            if span.start_s < meet_s:
                spans.append(replace(span, end_s=meet_s, kind=SpanKind.WAIT, name="wait"))
            if meet_s < span.end_s or span.start_s == span.end_s:
                spans.append(replace(span, start_s=meet_s))
        return replace(self, spans=tuple(spans))


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """One timeline of the spans that several ranks recorded of the same step."""
    parts = list(timelines)
    assert len({part.step for part in parts}) == 1, "only timelines of one step can be merged"
    return Timeline(
        step=parts[0].step,
        num_ranks=max(part.num_ranks for part in parts),
        spans=tuple(sorted(span for part in parts for span in part.spans)),
        memory=tuple(sorted(sample for part in parts for sample in part.memory)),
    )
