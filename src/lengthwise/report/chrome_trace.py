"""Timelines as a Chrome trace, which opens in Perfetto: one process a rank, steps one after another."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lengthwise.core.timeline import Timeline
from lengthwise.report.whole_file import write_whole

Event = dict[str, Any]
MOST_SPANS = 300_000
"""Measured spans in a trace; more make a file that viewers choke on."""


def chrome_trace(
    timelines: Iterable[Timeline], *, predicted: Iterable[Timeline] = (), run: str = "", first_pid: int = 0
) -> dict[str, Any]:
    """The trace of measured timelines and, as further processes below them, of predicted ones.

    Steps follow one another in order. A step begins at the same time on every process: it lasts as long as it was
    measured, or as long as predicted if that is longer, and what was planned ahead goes before it. Predicted steps
    that were not measured come too.

    Args:
        timelines: measured, one a step.
        predicted: at most one a step.
        run: goes before every process name, for traces of several runs.
        first_pid: process number of the first rank.
    """
    measured = {t.step: t for t in timelines}
    foreseen = {t.step: t for t in predicted}
    num_measured = max((t.num_ranks for t in measured.values()), default=0)
    num_foreseen = max((t.num_ranks for t in foreseen.values()), default=0)
    label = f"{run}: " if run else ""
    second_pid = first_pid + num_measured
    events = [
        *_names(f"{label}rank", num_measured, first_pid),
        *_names(f"{label}predicted rank", num_foreseen, second_pid),
    ]
    offset_s = 0.0
    for step in sorted(measured.keys() | foreseen.keys()):
        both = [
            (by_step[step], pid) for by_step, pid in ((measured, first_pid), (foreseen, second_pid)) if step in by_step
        ]
        offset_s += max(_lead_s(timeline) for timeline, _ in both)
        for timeline, pid in both:
            events += _events(timeline, pid, offset_s)
        offset_s += max(timeline.step_time_s for timeline, _ in both)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, timelines: Iterable[Timeline], *, predicted: Iterable[Timeline] = ()) -> None:
    """Write :func:`chrome_trace` gzipped, whole or not at all; equal timelines give equal files."""
    write_whole({path: packed(chrome_trace(timelines, predicted=predicted))})


def packed(trace: dict[str, Any]) -> bytes:
    """The bytes of a trace file."""
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=6, mtime=0)


def _lead_s(timeline: Timeline) -> float:
    """Seconds that spans begin before the step does: planning ahead."""
    return max(0.0, -min((span.start_s for span in timeline.spans), default=0.0))


def _names(label: str, num_ranks: int, first_pid: int) -> Iterator[Event]:
    for rank in range(num_ranks):
        place = {"ph": "M", "pid": first_pid + rank, "tid": 0}
        yield {**place, "name": "process_name", "args": {"name": f"{label} {rank}"}}
        yield {**place, "name": "process_sort_index", "args": {"sort_index": first_pid + rank}}


def _events(timeline: Timeline, first_pid: int, offset_s: float) -> Iterator[Event]:
    for span in timeline.spans:
        start_us, end_us = _microseconds(offset_s + span.start_s), _microseconds(offset_s + span.end_s)
        yield {
            "ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3), "pid": first_pid + span.rank, "tid": 0,
            "name": span.name or str(span.kind), "cat": str(span.kind), "args": {"step": timeline.step},
        }  # fmt: skip
    for sample in timeline.memory:
        yield {
            "ph": "C", "ts": _microseconds(offset_s + sample.time_s), "pid": first_pid + sample.rank, "name": "memory",
            "args": {"GiB": round(sample.num_bytes / 2**30, 6)},
        }  # fmt: skip


def _microseconds(time_s: float) -> float:
    """Whole nanoseconds, so that a span ends exactly where the next begins."""
    return round(time_s * 1e9) / 1e3
