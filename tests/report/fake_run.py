"""Run folders as a training run would leave them, made from the core types alone, the same on every call."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from lengthwise.config import run_config as config
from lengthwise.core.batch import Pack, num_targets
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.run_folder import RunFolder, timeline_to_row
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline

SCHEME = dense_scheme(4)
UPDATE_S = 0.012
START = {
    "date": "2026-01-01T12:00:00+00:00", "command": "lengthwise train config.yaml", "lengthwise_version": "0.1.0",
    "commit": "0123456789", "python_version": "3.11.2", "torch_version": "2.10.0", "host": "node-17", "num_ranks": 4,
    "device": "H100-80GB", "device_memory_bytes": 16 * 2**30,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fake:
    """What kind of run."""

    name: str = "demo"
    policy: str = "auto"
    num_steps: int = 24
    num_ranks: int = 4
    sequences_per_step: int = 24
    seed: int = 0
    timeline: bool = True
    status: dict = field(default_factory=lambda: {"state": "done", "exit_code": 0, "error": ""})
    corpus: bool = True
    provenance: bool = True


def make_run(path: Path, fake: Fake | None = None, **changes) -> RunFolder:
    """A run folder at ``path``."""
    fake = fake or Fake(**changes)
    folder = RunFolder(path)
    (path / "timeline").mkdir(parents=True)
    settings = {"name": fake.name, "data": {"index": "corpora/stdlib", "sequences_per_step": fake.sequences_per_step}}
    tree = {**settings, "train": {"steps": fake.num_steps, "timeline": fake.timeline}}
    config.check(tree).save(folder.config)
    rng = random.Random(fake.seed)
    plans = [_plan(step, fake) for step in range(fake.num_steps)]
    timelines = [_measure(plan, rng) for plan in plans]
    _write(folder.plans, [plan.to_json() for plan in plans])
    _write(folder.metrics, [_row(plan, timeline, rng) for plan, timeline in zip(plans, timelines)])
    if fake.timeline:
        for rank in range(fake.num_ranks):
            _write(folder.timeline(rank), [timeline_to_row(_of_rank(timeline, rank)) for timeline in timelines])
    if fake.corpus:
        folder.write_json("corpus.json", _corpus())
    if fake.provenance:
        folder.write_json("provenance.json", {"starts": [{"date": "2026-01-01T11:58:00+00:00"}, START]})
    if fake.status:
        folder.write_json("status.json", fake.status)
    folder.write_json("ledger.json", {"rule": "error", "max_length": None, "sequences_in": 1920, "dropped": 0})
    return folder


def lengths_of(step: int, count: int) -> list[int]:
    """Lengths as skewed as those of source code; the same for every policy."""
    rng = random.Random(1000 + step)
    return [min(30_000, max(16, int(rng.lognormvariate(7.2, 1.3)))) for _ in range(count)]


def cost_s(pack: Pack) -> float:
    """Seconds of a pack."""
    return 0.002 + sum(2e-5 * n + 1.2e-9 * n * n for n in pack.computed_lengths)


def simulate(plan: StepPlan) -> Timeline:
    """A stand-in for the simulator."""
    return _run(plan, lambda time_s: time_s)


def edit_row(folder: RunFolder, step: int, **changes) -> None:
    """Overwrite metrics of one step; a slash is written as two underscores."""
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for row in rows:
        if row["step"] == step:
            row.update({key.replace("__", "/"): value for key, value in changes.items()})
    _write(folder.metrics, rows)


def _plan(step: int, fake: Fake) -> StepPlan:
    lengths = lengths_of(step, fake.sequences_per_step)
    items = list(enumerate(lengths, start=step * fake.sequences_per_step))
    packs = _padded_packs(items) if fake.policy == "padded" else _packs(items)
    loads: list[list[PlannedMicroBatch]] = [[] for _ in range(fake.num_ranks)]
    balanced = fake.policy == "auto"
    order = sorted(packs, key=cost_s, reverse=True) if balanced else packs
    for k, pack in enumerate(order):
        lightest = min(range(fake.num_ranks), key=lambda r: sum(m.time_s for m in loads[r]))
        target = loads[lightest if balanced else k % fake.num_ranks]
        target.append(PlannedMicroBatch(pack=pack, time_s=cost_s(pack), peak_bytes=2**28 + pack.num_tokens * 20_000))
    busy = [sum(m.time_s for m in load) for load in loads]
    return StepPlan(
        step=step,
        policy=fake.policy,
        pipelines=tuple(
            Pipeline(ranks=(rank,), scheme=SCHEME, micro_batches=tuple(load)) for rank, load in enumerate(loads)
        ),
        loss_normaliser=max(1, num_targets(tuple(lengths))),
        update_s=UPDATE_S,
        time_s=max(busy) + UPDATE_S,
        lower_bound_s=sum(cost_s(Pack(ids=(i,), lengths=(n,))) - 0.002 for i, n in items) / fake.num_ranks + UPDATE_S,
    )


def _packs(items: list[tuple[int, int]], most: int = 4096) -> list[Pack]:
    bins: list[list[tuple[int, int]]] = []
    for item in sorted(items, key=lambda i: -i[1]):
        room = next((b for b in bins if sum(n for _, n in b) + item[1] <= most), None)
        if room is None:
            bins.append(room := [])
        room.append(item)
    return [Pack(ids=tuple(i for i, _ in b), lengths=tuple(n for _, n in b)) for b in bins]


def _padded_packs(items: list[tuple[int, int]], size: int = 3) -> list[Pack]:
    batches = [items[k : k + size] for k in range(0, len(items), size)]
    return [
        Pack(ids=tuple(i for i, _ in b), lengths=tuple(n for _, n in b), padded_to=max(n for _, n in b))
        for b in batches
    ]


def _measure(plan: StepPlan, rng: random.Random) -> Timeline:
    slow = 1.6 if plan.step == 0 else rng.uniform(0.97, 1.12)
    return _run(plan, lambda time_s: time_s * slow * rng.uniform(0.96, 1.05), data_s=0.001, gather_s=0.004)


def _run(plan: StepPlan, clock, *, data_s: float = 0.0, gather_s: float = 0.0) -> Timeline:
    spans, memory, ends = [], [], {}
    for pipeline in plan.pipelines:
        for rank in pipeline.ranks:
            now_s = data_s
            if data_s:
                spans.append(Span(start_s=0.0, end_s=data_s, rank=rank, kind=SpanKind.DATA, name="feed"))
            for k, m in enumerate(pipeline.micro_batches):
                end_s = now_s + clock(m.time_s)
                spans.append(
                    Span(start_s=now_s, end_s=end_s, rank=rank, kind=SpanKind.COMPUTE, name=f"micro-batch {k}")
                )
                memory.append(MemorySample(time_s=end_s, rank=rank, num_bytes=m.peak_bytes))
                now_s = end_s
            ends[rank] = now_s
    meet_s = max(ends.values()) + gather_s
    for rank, end_s in ends.items():
        done_s = meet_s + clock(plan.update_s)
        spans.append(Span(start_s=end_s, end_s=meet_s, rank=rank, kind=SpanKind.COMMUNICATE, name="push"))
        spans.append(Span(start_s=meet_s, end_s=done_s, rank=rank, kind=SpanKind.UPDATE, name="update"))
    spans = [span for span in spans if span.end_s > span.start_s]
    return Timeline(step=plan.step, num_ranks=plan.num_devices, spans=tuple(sorted(spans)), memory=tuple(memory))


def _of_rank(timeline: Timeline, rank: int) -> Timeline:
    return Timeline(
        step=timeline.step,
        num_ranks=timeline.num_ranks,
        spans=tuple(span for span in timeline.spans if span.rank == rank),
        memory=tuple(sample for sample in timeline.memory if sample.rank == rank),
    )


def _row(plan: StepPlan, timeline: Timeline, rng: random.Random) -> dict:
    lengths = [n for p in plan.pipelines for m in p.micro_batches for n in m.pack.lengths]
    return {
        "step": plan.step,
        "timestamp": f"2026-01-01T12:00:{plan.step:02}.500+00:00",
        "loss/avg": 9.0 * (plan.step + 1) ** -0.35 + rng.uniform(-0.1, 0.1),
        "grad_norm": 1.0,
        "lr": 3e-4,
        "perf/tokens_per_s": sum(lengths) / timeline.step_time_s,
        "perf/mfu": None,
        "memory/max_reserved_gib": 12.0 + min(plan.step, 8) / 4,
        "perf/step_time_s": timeline.step_time_s,
        "data/pad_frac": plan.padding_fraction,
        "data/max_len": max(lengths),
        "data/num_tokens": sum(lengths),
        "data/num_sequences": len(lengths),
        "balance/time_max_over_mean": timeline.imbalance,
        "plan/id": plan.digest,
        "plan/pred_time_s": plan.time_s,
        "plan/lower_bound_s": plan.lower_bound_s,
    }


def _corpus() -> dict:
    lengths = [n for step in range(80) for n in lengths_of(step, 24)]
    histogram = []
    for k in range(4, 15):
        low, high = 1 << k, 1 << (k + 1)
        inside = [n for n in lengths if low <= n < high]
        histogram.append({"low": low, "high": high, "num_sequences": len(inside), "num_tokens": sum(inside)})
    return {
        "histogram": histogram,
        "num_sequences": len(lengths),
        "num_tokens": sum(lengths),
        "max_length": max(lengths),
    }


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
