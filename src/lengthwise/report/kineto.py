"""Timelines as PyTorch's profiler writes them, one file per rank: what HolisticTraceAnalysis and its like read.

They tell kernels by their stream, communication by names that begin with nccl, and the step of a kernel by when the
host launches it; so every kernel gets a launch, joined to it by its correlation. Times are whole microseconds.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import PUSH, Timeline
from lengthwise.report.chrome_trace import COMMUNICATION, HOST, KERNEL, Event, chrome_trace, packed
from lengthwise.report.whole_file import write_whole

_COLLECTIVES = {"pull": "AllGather", "layout": "AllGather", "switch": "AllGather", PUSH: "ReduceScatter"}


def kineto_trace(
    rank: int, timelines: Iterable[Timeline], *, world_size: int, plans: Mapping[int, StepPlan] | None = None
) -> dict[str, Any]:
    """The trace of one rank."""
    events: list[Event] = []
    correlation = 0
    for event in chrome_trace(timelines, plans=plans, ranks=[rank])["traceEvents"]:
        if event["ph"] == "X":
            start_us = math.floor(event["ts"])
            event |= {"ts": start_us, "dur": math.floor(event["ts"] + event["dur"]) - start_us}
        if event.get("cat") == KERNEL:
            correlation += 1
            joined = {"correlation": correlation, "External id": correlation}
            launch = {
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": event["pid"], "tid": HOST.tid,
                "ts": event["ts"], "dur": 0, "args": joined,
            }  # fmt: skip
            events.append(launch)
            event["args"] |= joined
            if event["tid"] == COMMUNICATION.tid:
                event["args"]["name"] = event["name"]
                event["name"] = f"ncclDevKernel_{_COLLECTIVES.get(event['name'], 'SendRecv')}"
        events.append(event)
    place = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return {"schemaVersion": 1, "distributedInfo": place, "displayTimeUnit": "ms", "traceEvents": events}


def write_kineto(
    folder: Path, timelines: Sequence[Timeline], *, plans: Mapping[int, StepPlan] | None = None,
    ranks: Collection[int] | None = None,
) -> int:  # fmt: skip
    """Write one trace per rank into ``folder``; returns how many.

    Raises:
        InputError: the folder cannot be written.
    """
    folder.mkdir(exist_ok=True)
    world_size = max((timeline.num_ranks for timeline in timelines), default=0)
    files: dict[Path, bytes] = {}
    for rank in range(world_size):
        if ranks is None or rank in ranks:
            path = folder / f"rank_{rank:05d}.pt.trace.json.gz"
            files[path] = packed(kineto_trace(rank, timelines, world_size=world_size, plans=plans), name=path.name)
    write_whole(files)
    return len(files)
