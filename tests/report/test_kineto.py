"""Traces as PyTorch's profiler writes them, held against the rules by which HolisticTraceAnalysis reads its files."""

import gzip
import json
import re

import pytest

from lengthwise.core.errors import InputError
from lengthwise.report.kineto import kineto_trace, write_kineto
from lengthwise.report.whole_file import check_folder
from lengthwise.sim.engine import simulate
from tests.sim.plans import lane, make_plan

PLANS = {
    number: make_plan([lane(3.0, 2.0, comm=0.25, stages=2)], [lane(1.0), lane(2.5)], switch_s=0.5, step=number)
    for number in (3, 4)
}
TIMELINES = [simulate(plan) for plan in PLANS.values()]


def timed(trace):
    """What an analysis keeps: events with a duration and a category; -1 is the stream of the host."""
    return [
        (e, e.get("args", {}).get("stream", -1)) for e in trace["traceEvents"] if "dur" in e and "cat" in e
    ]  # fmt: skip


@pytest.fixture(params=[0, 1])
def trace(request):
    return kineto_trace(request.param, TIMELINES, world_size=2, plans=PLANS)


def test_every_rank_is_a_file_that_names_its_rank(tmp_path):
    assert write_kineto(tmp_path / "traces", TIMELINES, plans=PLANS) == 2
    for rank, path in enumerate(sorted((tmp_path / "traces").iterdir())):
        text = gzip.decompress(path.read_bytes()).decode()
        assert re.search(r'"rank":\s+(\d+)', text)[1] == str(rank), "HolisticTraceAnalysis looks for this"
        document = json.loads(text)
        assert document["distributedInfo"] == {"backend": "nccl", "rank": rank, "world_size": 2}
        assert document["schemaVersion"] == 1 and document["traceName"] == path.name
        assert {e["pid"] for e in document["traceEvents"]} == {1}


def test_only_chosen_ranks_are_written(tmp_path):
    assert write_kineto(tmp_path, TIMELINES, ranks=[1]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00001.pt.trace.json.gz"]


def test_a_kernel_is_launched_in_the_step_in_which_it_runs(trace):
    steps = {e["name"]: range(e["ts"], e["ts"] + e["dur"]) for e, _ in timed(trace) if e["name"].startswith("Profiler")}
    assert list(steps) == ["ProfilerStep#3", "ProfilerStep#4"]
    kernels = {e["args"]["correlation"]: e for e, stream in timed(trace) if stream > 0}
    launches = {e["args"]["correlation"]: e for e, stream in timed(trace) if e["cat"] == "cuda_runtime"}
    assert kernels.keys() == launches.keys() and len(kernels) > 10
    for number, kernel in kernels.items():
        assert launches[number]["ts"] in steps[f"ProfilerStep#{kernel['args']['step']}"]
        assert kernel["cat"] == "kernel" and launches[number]["name"] == "cudaLaunchKernel"


def test_communication_is_what_nccl_kernels_take_and_idle_is_what_no_kernel_covers(trace):
    rank = trace["distributedInfo"]["rank"]
    kernels = [e for e, stream in timed(trace) if stream > 0]
    by_nccl = sum(e["dur"] for e in kernels if e["name"].startswith("ncclDevKernel_"))
    spans = [span for timeline in TIMELINES for span in timeline.spans if span.rank == rank]
    assert by_nccl == pytest.approx(1e6 * sum(s.duration_s for s in spans if s.kind == "communicate"), abs=20)
    busy = sum(e["dur"] for e in kernels)
    assert busy == pytest.approx(1e6 * sum(s.duration_s for s in spans if s.kind != "wait"), abs=40)


def test_times_are_whole_and_kernels_of_a_stream_never_overlap(trace):
    by_stream = {}
    for event, stream in timed(trace):
        assert type(event["ts"]) is int and type(event["dur"]) is int and event["dur"] >= 0
        by_stream.setdefault(stream, []).append((event["ts"], event["dur"]))
    del by_stream[-1]
    for intervals in by_stream.values():
        ends = [0, *(ts + dur for ts, dur in sorted(intervals))]
        assert all(end <= ts for end, (ts, _) in zip(ends, sorted(intervals)))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--kineto .*file is a file; give the name of a folder"):
        check_folder(tmp_path / "file", "--kineto")
    with pytest.raises(InputError, match="there is no folder"):
        check_folder(tmp_path / "missing" / "traces", "--kineto")
    check_folder(tmp_path / "traces", "--kineto")
    check_folder(tmp_path, "--kineto")
