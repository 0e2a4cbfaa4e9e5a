import gzip
import json
from itertools import pairwise

import pytest

from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline
from lengthwise.report.chrome_trace import chrome_trace, write_trace


def step(number: int, *, time_s: float, num_ranks: int = 2) -> Timeline:
    spans = [
        Span(start_s=0.0, end_s=time_s, rank=rank, kind=SpanKind.COMPUTE, name=f"micro-batch {rank}")
        for rank in range(num_ranks)
    ]
    memory = (MemorySample(time_s=time_s / 2, rank=0, num_bytes=2**30),)
    return Timeline(step=number, num_ranks=num_ranks, spans=tuple(spans), memory=memory)


def of(trace: dict, phase: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_span_comes_back_with_its_time_rank_kind_and_step():
    timelines = [step(3, time_s=0.5), step(4, time_s=0.25)]
    trace = chrome_trace(timelines)
    found = [(e["ts"], e["dur"], e["pid"], e["cat"], e["name"], e["args"]["step"]) for e in of(trace, "X")]
    assert found == [
        (0.0, 5e5, 0, "compute", "micro-batch 0", 3),
        (0.0, 5e5, 1, "compute", "micro-batch 1", 3),
        (5e5, 2.5e5, 0, "compute", "micro-batch 0", 4),
        (5e5, 2.5e5, 1, "compute", "micro-batch 1", 4),
    ]
    assert [(e["ts"], e["args"]["GiB"]) for e in of(trace, "C")] == [(2.5e5, 1.0), (6.25e5, 1.0)]
    assert trace["displayTimeUnit"] == "ms"


def test_predicted_ranks_are_processes_below_and_steps_start_together():
    trace = chrome_trace(
        [step(0, time_s=1.0), step(1, time_s=1.0)], predicted=[step(0, time_s=2.0), step(1, time_s=1.0)]
    )
    names = {e["pid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "predicted rank 0", 3: "predicted rank 1"}
    starts = {pid: [e["ts"] for e in of(trace, "X") if e["pid"] == pid] for pid in names}
    assert starts == {pid: [0.0, 2e6] for pid in names}


def test_spans_of_a_rank_never_overlap_after_rounding():
    cuts = [k / 3 * 1e-4 for k in range(50)]
    spans = [Span(start_s=a, end_s=b, rank=0, kind=SpanKind.COMPUTE) for a, b in pairwise(cuts)]
    events = of(chrome_trace([Timeline(step=k, num_ranks=1, spans=tuple(spans)) for k in range(3)]), "X")
    for left, right in pairwise(events):
        assert left["ts"] + left["dur"] == pytest.approx(right["ts"], abs=1e-4)


def test_trace_file_round_trips_and_is_deterministic(tmp_path):
    write_trace(tmp_path / "a.json.gz", [step(0, time_s=1.0)])
    write_trace(tmp_path / "b.json.gz", [step(0, time_s=1.0)])
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())) == chrome_trace([step(0, time_s=1.0)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz"]


def test_no_timelines_make_an_empty_trace():
    assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_planning_ahead_goes_before_its_step_and_overlaps_none():
    ahead = Span(start_s=-0.25, end_s=-0.125, rank=0, kind=SpanKind.PLAN)
    work = Span(start_s=0.0, end_s=1.0, rank=0, kind=SpanKind.COMPUTE)
    events = of(chrome_trace([Timeline(step=k, num_ranks=1, spans=(ahead, work)) for k in range(2)]), "X")
    assert [(e["ts"], e["ts"] + e["dur"]) for e in events] == [
        (0.0, 1.25e5),
        (2.5e5, 1.25e6),
        (1.25e6, 1.375e6),
        (1.5e6, 2.5e6),
    ]
