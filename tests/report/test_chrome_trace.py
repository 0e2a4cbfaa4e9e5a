import gzip
import json
from itertools import pairwise

import pytest

from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline
from lengthwise.report.chrome_trace import chrome_trace, write_trace
from lengthwise.sim.engine import simulate
from tests.sim.plans import lane, make_plan


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
    computed = [e for e in of(trace, "X") if e["cat"] == "kernel"]
    assert [(e["ts"], e["dur"], e["pid"], e["args"]["kind"], e["name"], e["args"]["step"]) for e in computed] == [
        (0.0, 5e5, 1, "compute", "micro-batch 0", 3),
        (0.0, 5e5, 2, "compute", "micro-batch 1", 3),
        (5e5, 2.5e5, 1, "compute", "micro-batch 0", 4),
        (5e5, 2.5e5, 2, "compute", "micro-batch 1", 4),
    ]
    assert [(e["ts"], e["args"]["GiB"]) for e in of(trace, "C")] == [(2.5e5, 1.0), (6.25e5, 1.0)]
    assert trace["displayTimeUnit"] == "ms"


def test_predicted_ranks_are_processes_below_and_steps_start_together():
    trace = chrome_trace(
        [step(0, time_s=1.0), step(1, time_s=1.0)], predicted=[step(0, time_s=2.0), step(1, time_s=1.0)]
    )
    names = {e["pid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1", 3: "predicted rank 0", 4: "predicted rank 1"}
    starts = {pid: [e["ts"] for e in of(trace, "X") if e["pid"] == pid and e["tid"] == 7] for pid in names}
    assert starts == {pid: [0.0, 2e6] for pid in names}


def test_spans_of_a_rank_never_overlap_after_rounding():
    cuts = [k / 3 * 1e-4 for k in range(50)]
    spans = [Span(start_s=a, end_s=b, rank=0, kind=SpanKind.COMPUTE) for a, b in pairwise(cuts)]
    trace = chrome_trace([Timeline(step=k, num_ranks=1, spans=tuple(spans)) for k in range(3)])
    events = [e for e in of(trace, "X") if e["cat"] == "kernel"]
    for left, right in pairwise(events):
        assert left["ts"] + left["dur"] == pytest.approx(right["ts"], abs=1e-4)


def test_trace_file_round_trips_and_is_deterministic(tmp_path):
    write_trace(tmp_path / "a.json.gz", [step(0, time_s=1.0)])
    (tmp_path / "b").mkdir()
    write_trace(tmp_path / "b" / "a.json.gz", [step(0, time_s=1.0)])
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b" / "a.json.gz").read_bytes()
    written = json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))
    assert written == {**chrome_trace([step(0, time_s=1.0)]), "traceName": "a.json.gz"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json.gz", "b"]


def test_no_timelines_make_an_empty_trace():
    assert chrome_trace([]) == {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": []}


def test_planning_ahead_goes_before_its_step_and_overlaps_none():
    ahead = Span(start_s=-0.25, end_s=-0.125, rank=0, kind=SpanKind.PLAN)
    work = Span(start_s=0.0, end_s=1.0, rank=0, kind=SpanKind.COMPUTE)
    events = of(chrome_trace([Timeline(step=k, num_ranks=1, spans=(ahead, work)) for k in range(2)]), "X")
    assert [(e["ts"], e["ts"] + e["dur"]) for e in events if "kind" in e["args"]] == [
        (0.0, 1.25e5),
        (2.5e5, 1.25e6),
        (1.25e6, 1.375e6),
        (1.5e6, 2.5e6),
    ]


def test_no_process_has_number_0_and_all_tracks_are_named_and_ordered():
    trace = chrome_trace([step(0, time_s=1.0)], predicted=[step(0, time_s=1.0)])
    assert min(e["pid"] for e in trace["traceEvents"]) == 1
    tracks = {(e["pid"], e["tid"]) for e in of(trace, "X")}
    for field in ("thread_name", "thread_sort_index"):
        assert tracks <= {(e["pid"], e["tid"]) for e in of(trace, "M") if e["name"] == field}
    processes = {e["pid"] for e in trace["traceEvents"]}
    assert processes == {e["pid"] for e in of(trace, "M") if e["name"] == "process_sort_index"}


def test_each_step_is_a_slice_as_long_as_the_step_on_every_rank():
    trace = chrome_trace([step(3, time_s=0.5), step(4, time_s=0.25)])
    steps = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in of(trace, "X") if e["name"].startswith("ProfilerStep#")]
    assert steps == [
        ("ProfilerStep#3", 1, 0.0, 5e5),
        ("ProfilerStep#3", 2, 0.0, 5e5),
        ("ProfilerStep#4", 1, 5e5, 2.5e5),
        ("ProfilerStep#4", 2, 5e5, 2.5e5),
    ]


def test_communication_has_a_track_of_its_own_and_waits_are_no_kernels():
    kinds = [SpanKind.COMPUTE, SpanKind.COMMUNICATE, SpanKind.WAIT, SpanKind.UPDATE, SpanKind.DATA, SpanKind.PLAN]
    spans = tuple(Span(start_s=k, end_s=k + 1, rank=0, kind=kind) for k, kind in enumerate(kinds))
    slices = {
        e["args"]["kind"]: e
        for e in of(chrome_trace([Timeline(step=0, num_ranks=1, spans=spans)]), "X")
        if "kind" in e["args"]
    }
    assert {kind for kind, e in slices.items() if e["tid"] == slices["communicate"]["tid"]} == {"communicate"}
    assert {kind for kind, e in slices.items() if e["cat"] == "kernel"} == {"compute", "communicate", "update"}
    assert {kind for kind, e in slices.items() if "stream" in e["args"]} == {"compute", "communicate", "update"}
    assert len({e["cname"] for e in slices.values()}) == len(kinds)


def test_slices_say_what_their_micro_batch_holds():
    plan = make_plan([lane(3.0, 2.0, degree=2)])
    trace = chrome_trace([simulate(plan)], plans={plan.step: plan})
    (forward,) = [e for e in of(trace, "X") if e["name"] == "forward 1" and e["pid"] == 2]
    names = ("micro-batch", "pipeline", "stage", "tokens", "sequences", "scheme", "bytes")
    assert [forward["args"][name] for name in names] == [1, 0, 0, 5, 1, plan.pipelines[0].scheme.name, 1600]


def test_an_arrow_leads_from_every_pass_to_the_one_that_takes_its_result():
    plan = make_plan([lane(3.0, 2.0, degree=2, stages=3)], [lane(1.0, stages=6)])
    trace = chrome_trace([simulate(plan)], plans={plan.step: plan})
    starts, ends = of(trace, "s"), of(trace, "f")
    # phase 1: 2 micro-batches over 2 borders of 2 ranks; phase 2: 1 over 5 borders; each way
    assert len(starts) == len(ends) == len({e["id"] for e in starts}) == 2 * (2 * 2 * 2 + 5)
    slices = [e for e in of(trace, "X") if "micro-batch" in e["args"]]
    for start, end in zip(starts, ends):
        assert start["id"] == end["id"] and end["bp"] == "e" and start["ts"] < end["ts"]
        (sent,), (taken,) = ([e for e in slices if _holds(e, flow)] for flow in (start, end))
        assert sent["name"] == taken["name"] and sent["args"]["pipeline"] == taken["args"]["pipeline"]
        direction = -1 if sent["name"].startswith("backward") else 1
        assert taken["args"]["stage"] - sent["args"]["stage"] == direction
        assert start["ts"] == pytest.approx(sent["ts"] + sent["dur"], abs=0.01) and end["ts"] == taken["ts"]


def _holds(slice_: dict, flow: dict) -> bool:
    is_there = (slice_["pid"], slice_["tid"]) == (flow["pid"], flow["tid"])
    return is_there and slice_["ts"] <= flow["ts"] < slice_["ts"] + slice_["dur"]


def test_only_chosen_ranks_get_a_process_and_no_arrow_leads_to_others():
    plan = make_plan([lane(3.0, 2.0, stages=3)])
    trace = chrome_trace([simulate(plan)], plans={plan.step: plan}, ranks=[0, 1])
    names = {e["pid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"} == {pid: names[pid] for pid in {e["pid"] for e in trace["traceEvents"]}}
    assert len(of(trace, "s")) == len(of(trace, "f")) == 2 * 2
