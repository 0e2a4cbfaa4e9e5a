"""The ranks of one step, each a row, time to the right: measured above, predicted below, on one time scale."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lengthwise.core.timeline import Span, SpanKind, Timeline
from lengthwise.report.charts.svg import WIDTH, Chart, brief, path, plot, stretched, text
from lengthwise.report.charts.ticks import Axis, range_axis, second_labels
from lengthwise.report.units import seconds, share

KIND_WORDS = {
    SpanKind.COMPUTE: "compute",
    SpanKind.COMMUNICATE: "communicate",
    SpanKind.WAIT: "wait for other ranks",
    SpanKind.UPDATE: "update weights",
    SpanKind.DATA: "load data",
    SpanKind.PLAN: "plan",
}
MOST_ROWS = 16
_MOST_SPANS = 150
_CELLS = 500

Stretch = tuple[float, float, SpanKind]
"""Start, end and kind of something drawn."""


def gantt_chart(measured: Timeline | None, predicted: Timeline | None, *, label: str) -> Chart | None:
    """Both timelines, or the one there is; None when neither lasts."""
    pair = (("measured", measured), ("predicted", predicted))
    groups = [(name, timeline) for name, timeline in pair if timeline and timeline.step_time_s > 0]
    if not groups:
        return None
    end_s = max(timeline.step_time_s for _, timeline in groups)
    x = range_axis(0.0, end_s, title="time since the start of the step", labels=second_labels)
    ranks = [rank for rank in shown_ranks(groups[0][1]) if rank < min(timeline.num_ranks for _, timeline in groups)]
    row = 22 if len(ranks) <= 8 else 14
    height = len(groups) * (len(ranks) * row + 26) - 8
    shapes: list[str] = []
    names: list[str] = []
    for g, (group, timeline) in enumerate(groups):
        top = g * (len(ranks) * row + 26)
        names.append(text(f"{group}, {seconds(timeline.step_time_s)}", 0, top + 10, class_="group-name"))
        spans_of = _by_rank(timeline)
        for k, rank in enumerate(ranks):
            shapes += _row(spans_of[rank], end_s, top=top + 16 + k * row, thick=row - 4)
            names.append(text(f"rank {rank}", -8, top + 16 + k * row + (row - 4) / 2 + 4, anchor="end"))
    empty = Axis(low=0, high=1, ticks=(), labels=())
    kinds = {span.kind for _, timeline in groups for span in timeline.spans}
    return Chart(
        svg=plot([stretched(shapes, height), *names], x=x, y=empty, height=height, label=label, end_s=end_s),
        legend=tuple((f"k-{kind}", words) for kind, words in KIND_WORDS.items() if kind in kinds),
        columns=("", "rank", *(words for kind, words in KIND_WORDS.items() if kind in kinds), "idle share"),
        rows=tuple(_numbers(groups, ranks, [kind for kind in KIND_WORDS if kind in kinds])),
    )


def shown_ranks(timeline: Timeline) -> list[int]:
    """All ranks, or of many the busiest, the least busy and an even choice between."""
    spans_of = _by_rank(timeline)
    loads = [_times_s(spans_of[rank])[SpanKind.COMPUTE] for rank in range(timeline.num_ranks)]
    order = sorted(range(timeline.num_ranks), key=lambda rank: loads[rank])
    if len(order) <= MOST_ROWS:
        return sorted(order)
    return sorted({order[round(k * (len(order) - 1) / (MOST_ROWS - 1))] for k in range(MOST_ROWS)})


def drawn(spans: Iterable[Span], end_s: float) -> list[Stretch]:
    """What to draw of a rank: its spans, or of very many the kind that fills most of each small stretch of time.

    Planning ahead happens before the step starts, at negative times; it is not drawn.
    """
    spans = [replace(span, start_s=max(0.0, span.start_s)) for span in sorted(spans) if span.end_s > 0]
    if len(spans) <= _MOST_SPANS:
        return [(span.start_s, span.end_s, span.kind) for span in spans if span.end_s > span.start_s]
    cell_s = end_s / _CELLS
    filled: list[dict[SpanKind, float]] = [{} for _ in range(_CELLS)]
    for span in spans:
        for cell in range(min(_CELLS - 1, int(span.start_s / cell_s)), min(_CELLS, int(span.end_s / cell_s) + 1)):
            part_s = min(span.end_s, (cell + 1) * cell_s) - max(span.start_s, cell * cell_s)
            if part_s > 0:
                filled[cell][span.kind] = filled[cell].get(span.kind, 0.0) + part_s
    stretches: list[Stretch] = []
    for cell, parts in enumerate(filled):
        if sum(parts.values()) < 0.5 * cell_s:
            continue
        kind = max(parts, key=lambda k: parts[k])
        start_s, stop_s = cell * cell_s, (cell + 1) * cell_s
        if stretches and stretches[-1][2] is kind and stretches[-1][1] == start_s:
            start_s = stretches.pop()[0]
        stretches.append((start_s, stop_s, kind))
    return stretches


def coarseness(timeline: Timeline | None) -> str:
    """A sentence if ranks have more spans than are drawn one by one; empty otherwise."""
    if timeline is None or max(map(len, _by_rank(timeline).values()), default=0) <= _MOST_SPANS:
        return ""
    return f"Rows of over {_MOST_SPANS} spans show what fills most of each {_CELLS}th of the step; the trace has all."


def _by_rank(timeline: Timeline) -> dict[int, list[Span]]:
    spans_of: dict[int, list[Span]] = {rank: [] for rank in range(timeline.num_ranks)}
    for span in timeline.spans:
        spans_of[span.rank].append(span)
    return spans_of


def _times_s(spans: Iterable[Span]) -> dict[SpanKind, float]:
    """Seconds of each kind."""
    times_s = dict.fromkeys(SpanKind, 0.0)
    for span in spans:
        times_s[span.kind] += span.duration_s
    return times_s


def _row(spans: Sequence[Span], end_s: float, *, top: float, thick: float) -> list[str]:
    """One path a kind: a rank's row costs a few hundred bytes, however many spans it has."""
    times_s = _times_s(spans)
    outlines: dict[SpanKind, list[str]] = {}
    for start_s, stop_s, kind in drawn(spans, end_s):
        left = start_s / end_s * WIDTH
        width = max(0.5, (stop_s - start_s) / end_s * WIDTH)
        outline = f"M{brief(left)} {brief(top)}h{brief(width)}v{brief(thick)}h-{brief(width)}z"
        outlines.setdefault(kind, []).append(outline)
    return [
        path("".join(outline), f"span k-{kind}", f"rank {spans[0].rank}, {KIND_WORDS[kind]}: {seconds(times_s[kind])}")
        for kind, outline in outlines.items()
    ]


def _numbers(
    groups: Sequence[tuple[str, Timeline]], ranks: Sequence[int], kinds: Sequence[SpanKind]
) -> Iterable[tuple[str, ...]]:
    for name, timeline in groups:
        spans_of = _by_rank(timeline)
        for rank in ranks:
            times_s = _times_s(spans_of[rank])
            busy_s = sum(times_s.values()) - times_s[SpanKind.WAIT]
            idle = max(0.0, 1.0 - busy_s / timeline.step_time_s)
            yield (name, str(rank), *(seconds(times_s[kind]) for kind in kinds), share(idle))
