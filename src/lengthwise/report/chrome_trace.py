"""Timelines as a Chrome trace, which opens in Perfetto: a process per rank, with tracks for steps, streams and host.

Categories, arguments and names of fields are those of PyTorch's profiler (Kineto), so that tools for its traces read
these; :mod:`lengthwise.report.kineto` writes them as that profiler lays them out, one file per rank.
"""

import gzip
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import Span, SpanKind, Timeline
from lengthwise.report.planned_passes import PlannedPass, planned_passes
from lengthwise.report.whole_file import write_whole

Event = dict[str, Any]
MOST_SPANS = 300_000
"""Measured spans in a trace; more make a file that viewers choke on."""
KERNEL = "kernel"
"""Category of what runs on the device."""


class Track(NamedTuple):
    """One row of a rank's process."""

    tid: int
    name: str
    stream: int = -1
    """The device's stream; -1: the host."""


STEPS, HOST = Track(1, "steps"), Track(2, "host")
COMPUTE, COMMUNICATION = Track(7, "stream 7: compute", 7), Track(20, "stream 20: communication", 20)
TRACKS = (STEPS, COMPUTE, COMMUNICATION, HOST)

_LOOKS = {
    SpanKind.PLAN: (HOST, "cpu_op", "olive"),
    SpanKind.DATA: (HOST, "cpu_op", "yellow"),
    SpanKind.COMPUTE: (COMPUTE, KERNEL, "thread_state_running"),
    SpanKind.COMMUNICATE: (COMMUNICATION, KERNEL, "thread_state_iowait"),
    SpanKind.WAIT: (COMPUTE, "user_annotation", "grey"),
    SpanKind.UPDATE: (COMPUTE, KERNEL, "rail_load"),
}
"""Track, Kineto's category and Chrome's colour of each kind of span. Waits are no kernels: the device is idle."""


def chrome_trace(
    timelines: Iterable[Timeline],
    *,
    predicted: Iterable[Timeline] = (),
    plans: Mapping[int, StepPlan] | None = None,
    ranks: Collection[int] | None = None,
    run: str = "",
    first_pid: int = 1,
) -> dict[str, Any]:
    """The trace of measured timelines and, as further processes below them, of predicted ones.

    Steps follow one another in order. A step begins at the same time on every process: it lasts as long as it was
    measured, or as long as predicted if that is longer, and what was planned ahead goes before it. Predicted steps
    that were not measured come too.

    Args:
        timelines: measured, one a step.
        predicted: at most one a step.
        plans: by step; slices say what their micro-batches hold, and arrows lead from stage to stage of a pipeline.
        ranks: the ranks that get a process; None: all.
        run: goes before every process name, for traces of several runs.
        first_pid: process number of the first rank; 0 is taken, viewers have it stand for no process.
    """
    measured = {t.step: t for t in timelines}
    foreseen = {t.step: t for t in predicted}
    pids_of: list[dict[int, int]] = []
    events: list[Event] = []
    label = f"{run}: " if run else ""
    for by_step, words in ((measured, "rank"), (foreseen, "predicted rank")):
        num_ranks = max((t.num_ranks for t in by_step.values()), default=0)
        shown = [rank for rank in range(num_ranks) if ranks is None or rank in ranks]
        pids_of.append({rank: first_pid + k for k, rank in enumerate(shown)})
        first_pid += len(shown)
        for rank, pid in pids_of[-1].items():
            events += _names(f"{label}{words} {rank}", pid)
    offset_s = 0.0
    for step in sorted(measured.keys() | foreseen.keys()):
        both = [(by_step[step], pids) for by_step, pids in zip((measured, foreseen), pids_of) if step in by_step]
        offset_s += max(_lead_s(timeline) for timeline, _ in both)
        for timeline, pids in both:
            events += _events(timeline, (plans or {}).get(step), pids, offset_s)
        offset_s += max(timeline.step_time_s for timeline, _ in both)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, timelines: Iterable[Timeline], **options: Any) -> None:
    """Write :func:`chrome_trace` gzipped, whole or not at all; equal timelines give equal files."""
    write_whole({path: packed(chrome_trace(timelines, **options), name=path.name)})


def packed(trace: dict[str, Any], *, name: str) -> bytes:
    """The bytes of the trace file ``name``; a space follows each colon, by which tools find a rank without parsing."""
    document = {**trace, "traceName": name}
    return gzip.compress(json.dumps(document, separators=(",", ": ")).encode(), compresslevel=6, mtime=0)


def _lead_s(timeline: Timeline) -> float:
    """Seconds that spans begin before the step does: planning ahead."""
    return max(0.0, -min((span.start_s for span in timeline.spans), default=0.0))


def _names(name: str, pid: int) -> Iterator[Event]:
    """The name and the place of a process and of its tracks."""
    yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for place, track in enumerate(TRACKS):
        here = {"ph": "M", "pid": pid, "tid": track.tid, "ts": 0}
        yield {**here, "name": "thread_name", "args": {"name": track.name}}
        yield {**here, "name": "thread_sort_index", "args": {"sort_index": place}}


def _events(timeline: Timeline, plan: StepPlan | None, pids: Mapping[int, int], offset_s: float) -> Iterator[Event]:
    args: dict[str, Any] = {"step": timeline.step}
    if plan is not None:
        args |= {"policy": plan.policy, "strategy": plan.strategy_words, "predicted_s": plan.time_s}
    for pid in (pid for rank, pid in pids.items() if rank < timeline.num_ranks):
        yield _slice(
            f"ProfilerStep#{timeline.step}", "user_annotation", STEPS, pid,
            offset_s, offset_s + timeline.step_time_s, args,
        )  # fmt: skip
    passes = [(span, planned) for span, planned in planned_passes(timeline, plan) if span.rank in pids]
    for span, planned in passes:
        track, category, colour = _LOOKS[span.kind]
        args = {"step": timeline.step, "kind": str(span.kind)}
        if track.stream >= 0 and category == KERNEL:
            args |= {"device": span.rank, "stream": track.stream}
        if planned is not None:
            args |= planned.details
        event = _slice(
            span.name or str(span.kind), category, track, pids[span.rank],
            offset_s + span.start_s, offset_s + span.end_s, args,
        )  # fmt: skip
        yield {**event, "cname": colour}
    yield from _arrows(passes, pids, offset_s, step=timeline.step)
    for sample in timeline.memory:
        if sample.rank in pids:
            yield {
                "ph": "C", "ts": _microseconds(offset_s + sample.time_s), "pid": pids[sample.rank], "name": "memory",
                "args": {"GiB": round(sample.num_bytes / 2**30, 6)},
            }  # fmt: skip


def _slice(
    name: str, category: str, track: Track, pid: int, start_s: float, end_s: float, args: dict[str, Any]
) -> Event:
    start_us, end_us = _microseconds(start_s), _microseconds(end_s)
    return {
        "ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3), "pid": pid, "tid": track.tid, "name": name,
        "cat": category, "args": args,
    }  # fmt: skip


def _arrows(
    passes: list[tuple[Span, PlannedPass | None]], pids: Mapping[int, int], offset_s: float, *, step: int
) -> Iterator[Event]:
    """Flow events from the end of each pass to the beginning of the pass that takes what it sends."""
    spans_of: dict[tuple[int, str, bool, int], list[Span]] = {}
    sends: dict[tuple[int, str, bool, int], int] = {}
    for span, planned in passes:
        if planned is None or planned.gives_weights or span.kind is SpanKind.DATA:
            continue
        key = (planned.position, planned.name, planned.is_backward, span.rank)
        spans_of.setdefault(key, []).append(span)
        if (receiver := planned.next_rank()) is not None:
            sends[key] = receiver
    for number, (key, receiver) in enumerate(sends.items()):
        position, micro_batch, is_backward, sender = key
        received = spans_of.get((position, micro_batch, is_backward, receiver))
        if not received:
            continue
        sent, taken = spans_of[key][-1], received[0]
        words = f"{'gradient' if is_backward else 'output'} of micro-batch {micro_batch}"
        flow = {"cat": "pipeline", "name": words, "id": f"{step}.{number}"}
        end_us = max(_microseconds(offset_s + sent.start_s), _microseconds(offset_s + sent.end_s) - 1e-3)
        start_us = _microseconds(offset_s + taken.start_s)
        sent_at, taken_at = _LOOKS[sent.kind][0].tid, _LOOKS[taken.kind][0].tid
        yield {**flow, "ph": "s", "ts": round(end_us, 3), "pid": pids[sender], "tid": sent_at}
        yield {**flow, "ph": "f", "bp": "e", "ts": start_us, "pid": pids[receiver], "tid": taken_at}


def _microseconds(time_s: float) -> float:
    """Whole nanoseconds, so that a span ends exactly where the next begins."""
    return round(time_s * 1e9) / 1e3
