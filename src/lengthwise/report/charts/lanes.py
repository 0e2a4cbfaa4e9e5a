"""One step of one policy: a row for every pipeline stage, or a choice of them, time to the right on a given scale."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import Span, SpanKind, Timeline
from lengthwise.report.charts.gantt import KIND_WORDS, drawn
from lengthwise.report.charts.svg import WIDTH, Chart, brief, path, plot, stretched, text
from lengthwise.report.charts.ticks import Axis, range_axis, second_labels
from lengthwise.report.units import seconds, share

MOST_ROWS = 16
_DENSE = 60
"""Spans from which on a row is drawn without lines between them: the lines would hide the spans."""
_ROW = 16
_THICK = 12


@dataclass(frozen=True, kw_only=True)
class StageLane:
    """One stage of one pipeline; its devices do the same at the same time, so one of them is drawn."""

    ranks: tuple[int, ...]
    stage: int
    pipeline: Pipeline

    @property
    def name(self) -> str:
        """The ranks, as short as they can be: ``0-7``."""
        first, last = self.ranks[0], self.ranks[-1]
        return f"{first}-{last}" if last > first and last < 1000 else str(first)


def step_chart(plan: StepPlan, timeline: Timeline, *, end_s: float, label: str) -> Chart:
    """The lanes of a plan as ``timeline`` has them, on an axis from 0 to ``end_s``."""
    lanes = shown_lanes(plan)
    x = range_axis(0.0, end_s, title="time since the start of the step", labels=second_labels)
    height = len(lanes) * _ROW
    spans_of = _spans_of(timeline, {lane.ranks[0] for lane in lanes})
    shapes, names, rows = [], [], []
    for k, lane in enumerate(lanes):
        spans = spans_of[lane.ranks[0]]
        words = f"ranks {lane.name}: stage {lane.stage + 1} of {lane.pipeline.scheme.name}"
        shapes += _row(spans, end_s, top=k * _ROW + (_ROW - _THICK) / 2, words=words)
        names.append(text(lane.name, -8, k * _ROW + _ROW / 2 + 4, anchor="end"))
        rows.append(_numbers(lane, spans, timeline.step_time_s))
    kinds = {span.kind for spans in spans_of.values() for span in spans}
    empty = Axis(low=0, high=1, ticks=(), labels=(), title="ranks")
    return Chart(
        svg=plot([stretched(shapes, height), *names], x=x, y=empty, height=height, label=label, end_s=end_s),
        legend=tuple((f"k-{kind}", words) for kind, words in KIND_WORDS.items() if kind in kinds),
        columns=("ranks", "scheme", "stage", "micro-batches", "tokens", "compute", "communicate", "idle share"),
        rows=tuple(rows),
    )


def num_lanes(plan: StepPlan) -> int:
    """Rows that a chart of all pipeline stages would have."""
    return sum(pipeline.scheme.num_stages for pipeline in _widest_phase(plan))


def shown_lanes(plan: StepPlan) -> list[StageLane]:
    """All stages of all pipelines; of many, whole pipelines: of each scheme the busiest, the least busy, and so on.

    Of a step in phases, the pipelines are those of the phase that has the most stages.
    """
    pipelines = _widest_phase(plan)
    if num_lanes(plan) > MOST_ROWS:
        pipelines = _chosen(pipelines)
    return [
        StageLane(
            ranks=pipeline.ranks[stage * pipeline.scheme.degree : (stage + 1) * pipeline.scheme.degree],
            stage=stage,
            pipeline=pipeline,
        )
        for pipeline in pipelines
        for stage in range(pipeline.scheme.num_stages)
    ]


def _widest_phase(plan: StepPlan) -> list[Pipeline]:
    phases = [[p for p in plan.pipelines if p.phase == phase] for phase in range(plan.num_phases)]
    return max(phases, key=lambda pipelines: sum(p.scheme.num_stages for p in pipelines))


def _chosen(pipelines: Sequence[Pipeline]) -> list[Pipeline]:
    """Choose as many lanes as rows, at least one: in turn from each scheme, from both ends of its loads."""
    by_scheme: dict[str, list[Pipeline]] = {}
    for pipeline in sorted(pipelines, key=lambda p: -sum(m.time_s for m in p.micro_batches)):
        by_scheme.setdefault(pipeline.scheme.name, []).append(pipeline)
    chosen: list[Pipeline] = []
    num_rows = 0
    for turn in range(MOST_ROWS):
        for lanes_of_scheme in by_scheme.values():
            if not lanes_of_scheme:
                continue
            pipeline = lanes_of_scheme.pop(0 if turn % 2 == 0 else -1)
            if not chosen or num_rows + pipeline.scheme.num_stages <= MOST_ROWS:
                chosen.append(pipeline)
                num_rows += pipeline.scheme.num_stages
    return sorted(chosen, key=lambda p: p.ranks)


def _spans_of(timeline: Timeline, ranks: set[int]) -> dict[int, list[Span]]:
    spans_of: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in timeline.spans:
        if span.rank in ranks:
            spans_of[span.rank].append(span)
    return spans_of


def _row(spans: Sequence[Span], end_s: float, *, top: float, words: str) -> list[str]:
    """One path a kind."""
    outlines: dict[SpanKind, list[str]] = {}
    times_s = dict.fromkeys(SpanKind, 0.0)
    for span in spans:
        times_s[span.kind] += span.duration_s
    class_ = "span dense" if len(spans) > _DENSE else "span"
    for start_s, stop_s, kind in drawn(spans, end_s):
        left, width = start_s / end_s * WIDTH, max(0.5, (stop_s - start_s) / end_s * WIDTH)
        outline = f"M{brief(left)} {brief(top)}h{brief(width)}v{_THICK}h-{brief(width)}z"
        outlines.setdefault(kind, []).append(outline)
    return [
        path("".join(outline), f"{class_} k-{kind}", f"{words}, {KIND_WORDS[kind]}: {seconds(times_s[kind])}")
        for kind, outline in outlines.items()
    ]


def _numbers(lane: StageLane, spans: Sequence[Span], step_time_s: float) -> tuple[str, ...]:
    times_s = dict.fromkeys(SpanKind, 0.0)
    for span in spans:
        times_s[span.kind] += span.duration_s
    busy_s = sum(times_s.values()) - times_s[SpanKind.WAIT]
    micro_batches = lane.pipeline.micro_batches
    return (
        f"{lane.ranks[0]}-{lane.ranks[-1]}", lane.pipeline.scheme.name, str(lane.stage + 1), f"{len(micro_batches):,}",
        f"{sum(m.pack.num_tokens for m in micro_batches):,}", seconds(times_s[SpanKind.COMPUTE]),
        seconds(times_s[SpanKind.COMMUNICATE]), share(max(0.0, 1.0 - busy_s / step_time_s)),
    )  # fmt: skip
