"""Metrics of a step as one row, written to JSON lines."""

import errno
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lengthwise.core.atomic_write import write_text
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind, Timeline
from lengthwise.core.wording import GIB
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.train.clock import peak_bytes
from lengthwise.runtime.train.execute_step import StepResult

Row = dict[str, Any]
MAX_TIMELINE_BYTES = 64 << 20
"""Size of a rank's timelines, about a million spans."""


class StepCallback(Protocol):
    """Called after every finished step, on the first rank alone."""

    def on_step(self, row: Row) -> None:
        """Take the metrics of one step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds of one step over all ranks."""

    step_s: float
    """From the first rank's start to the last rank's end."""
    compute_s: tuple[float, ...]
    """Of each rank."""
    data_wait_s: float
    """That ranks waited for their tokens."""
    communicate_s: float
    update_s: float
    idle_s: float
    """Seconds that the mean rank waits for others: what planning, data, compute, update and collectives leave. A rank
    that comes early waits within its collectives; so these count as long as they take the rank that waits least.
    """
    peak_bytes: int
    recompiles: int = 0
    """Graphs that ranks compiled within the step, together."""


def measure(timeline: Timeline, world: DistContext, *, recompiles: int = 0) -> StepTiming:
    """Share this rank's times with the others. One small all-gather; times but compute are means over ranks."""
    times_s = [timeline.time_s(kind, world.rank) for kind in _SHARED_KINDS]
    plan_s = sum(s.end_s - max(0.0, s.start_s) for s in timeline.spans if s.kind is SpanKind.PLAN and s.end_s > 0.0)
    values = [timeline.step_time_s, plan_s, *times_s, peak_bytes(world.device), recompiles]
    row = torch.tensor(values, dtype=torch.float64)
    ends, plan, compute, data, communicate, update, peaks, graphs = gather_rows(row.to(world.device)).T.tolist()
    step_s, busy_s = max(ends), sum(plan + data + compute + update) / world.size + min(communicate)
    return StepTiming(
        step_s=step_s,
        compute_s=tuple(compute),
        data_wait_s=sum(data) / world.size,
        communicate_s=sum(communicate) / world.size,
        update_s=sum(update) / world.size,
        idle_s=max(0.0, step_s - busy_s),
        peak_bytes=int(max(peaks)),
        recompiles=int(sum(graphs)),
    )


_SHARED_KINDS = (SpanKind.COMPUTE, SpanKind.DATA, SpanKind.COMMUNICATE, SpanKind.UPDATE)


def step_row(
    plan: StepPlan, result: StepResult, measured: StepTiming, *, model: ModelSpec | None, peak_flops_per_s: float | None
) -> Row:
    """The metrics of one step, named as other trainers name them. Tokens are those trained, padding left out.

    ``model``: counts model FLOPs; None: they are not known.
    """
    lengths = [length for p in plan.pipelines for m in p.micro_batches for length in m.pack.lengths]
    tokens = sum(lengths)
    by_device = [0.0] * plan.num_devices
    for pipeline in plan.pipelines:
        share = sum(m.pack.num_tokens for m in pipeline.micro_batches) / pipeline.scheme.degree
        for rank in pipeline.ranks:
            by_device[rank] += share
    flops = None if model is None else float(model.train_flops(np.asarray(lengths)).sum())
    flops_per_s = None if flops is None else flops / measured.step_s / plan.num_devices
    scaled = {} if result.loss_scale is None else {"loss_scale": result.loss_scale, "skipped_steps": result.num_skipped}
    return {
        "step": plan.step,
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "loss/avg": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "lr_factor": plan.lr_factor,
        **scaled,
        "perf/tokens_per_s": tokens / measured.step_s,
        "perf/tokens_per_s_per_gpu": tokens / measured.step_s / plan.num_devices,
        "perf/tflops_per_gpu": None if flops_per_s is None else flops_per_s / 1e12,
        "perf/mfu": flops_per_s / peak_flops_per_s if flops_per_s and peak_flops_per_s else None,
        "perf/step_time_s": measured.step_s,
        "time/data_wait_s": measured.data_wait_s,
        "time/fwd_bwd_s": sum(measured.compute_s) / len(measured.compute_s),
        "time/comm_wait_s": measured.communicate_s,
        "time/optim_s": measured.update_s,
        "data/num_tokens": tokens,
        "data/num_sequences": len(lengths),
        "data/max_len": max(lengths),
        "data/pad_frac": plan.padding_fraction,
        "data/wait_frac": measured.data_wait_s / measured.step_s,
        "balance/tokens_max_over_mean": max(by_device) * len(by_device) / sum(by_device),
        "balance/time_max_over_mean": max(measured.compute_s) * len(by_device) / sum(measured.compute_s),
        "balance/idle_frac": measured.idle_s / measured.step_s,
        "plan/id": plan.digest,
        "plan/policy": plan.policy,
        "plan/strategy": plan.strategy_words,
        "plan/pred_time_s": plan.time_s or None,  # a plan made by hand may predict nothing
        "plan/pred_error": plan.time_s / measured.step_s - 1.0 if plan.time_s else None,
        "plan/lower_bound_s": plan.lower_bound_s,
        "compile/recompiles": measured.recompiles,
        "memory/max_reserved_gib": measured.peak_bytes / GIB,
    }


class JsonLines:
    """Appends rows to a file, each whole or not at all to a reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def on_step(self, row: Row) -> None:
        """Write the row.

        Raises:
            OSError: the disk refuses it, or the file was removed or replaced.
        """
        content = json.dumps(row).encode() + b"\n"
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
            while is_there and content:  # nearly full, a disk takes a part
                content = content[self._file.write(content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if not is_there:
            raise OSError(errno.ESTALE, "another file took the place of the one that the run writes", str(self._path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TimelineLines(JsonLines):
    """Appends timelines to a file of bounded size: when it is full, older steps are thinned.

    The newer half of the rows stays; of the older half, steps that are multiples of 2, then 4, 8 and so on. Ranks whose
    files fill at different steps thus have the coarser choice in common, and reports use the steps that all ranks have.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_TIMELINE_BYTES) -> None:
        super().__init__(path)
        self._max_bytes = max_bytes
        self._stride = 1

    def on_step(self, row: Row) -> None:
        """Write the row, and make room if the file is full.

        Raises:
            OSError: the disk refuses it, or the file was removed or replaced.
        """
        super().on_step(row)
        if self._file.tell() <= self._max_bytes:
            return
        rows = self._path.read_bytes().splitlines(keepends=True)
        older, newer = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        while older and sum(map(len, older + newer)) > self._max_bytes * 3 // 4:
            self._stride *= 2
            older = [line for line in older if json.loads(line)["step"] % self._stride == 0] if len(older) > 1 else []
        self._file.close()
        write_text(self._path, b"".join(older + newer).decode())
        self._file = self._path.open("ab", buffering=0)
