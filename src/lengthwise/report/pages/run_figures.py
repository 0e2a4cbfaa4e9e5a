"""The figures of one run, each with its sentence; a figure that cannot be drawn says why."""

import math
from dataclasses import dataclass, field

from lengthwise.core.timeline import SpanKind, Timeline
from lengthwise.report.charts.bars import share_bar
from lengthwise.report.charts.gantt import KIND_WORDS, MOST_ROWS, coarseness, gantt_chart
from lengthwise.report.charts.histogram import length_histogram
from lengthwise.report.charts.lines import LineStyle, Series, line_chart
from lengthwise.report.charts.scatter import BAND, scatter_chart
from lengthwise.report.charts.svg import Chart
from lengthwise.report.charts.ticks import share_labels
from lengthwise.report.record import RunRecord
from lengthwise.report.run_summary import (
    RunSummary,
    StepSummary,
    steps_to_pick,
    time_shares,
    typical_step,
    worst_step,
)
from lengthwise.report.units import number, rough_share, seconds, share, tokens

NO_TIMELINES = "No timelines were recorded; train with train.timeline=true to see them."
LOG_RATIO = 20.0
"""A loss that falls by more than this factor is drawn on a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with a title and a sentence that says what to see; ``missing`` says why there is no chart."""

    title: str
    caption: str = ""
    chart: Chart | None = None
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the page shows of one run."""

    record: RunRecord
    summary: RunSummary
    predicted: dict[int, Timeline] = field(default_factory=dict)
    """Simulated timelines by step; steps may be missing."""


def time_figure(run: RunReport) -> Figure:
    """Where the device time goes, one bar."""
    shares = time_shares(run.record, run.summary)
    words = {**{str(kind): words for kind, words in KIND_WORDS.items()}, "idle": "idle"}
    parts = [
        (words[name], f"k-{SpanKind.WAIT if name == 'idle' else name}", shares[name])
        for name in words
        if name in shares
    ]
    chart = share_bar(parts, label=f"Where the device time of {run.summary.name} goes")
    return Figure(title="Where the device time goes", chart=chart, missing=NO_TIMELINES)


def length_figure(run: RunReport) -> Figure:
    """How long the sequences of the corpus are."""
    bins = run.record.length_bins
    caption = ""
    long = [b for b in bins if b.low >= 8192]
    if long and (all_tokens := sum(b.num_tokens for b in bins)):
        sequences = sum(b.num_sequences for b in long) / sum(b.num_sequences for b in bins)
        caption = (
            f"Sequences of {tokens(long[0].low)} tokens and more are {share(sequences)} of the sequences "
            f"and hold {share(sum(b.num_tokens for b in long) / all_tokens)} of the tokens."
        )
    return Figure(
        title="Sequence lengths",
        caption=caption,
        chart=length_histogram(bins, label="Lengths of the sequences of the corpus, share of sequences and of tokens"),
        missing="The run did not record the lengths of its corpus (corpus.json).",
    )


def loss_figure(run: RunReport) -> Figure:
    """The loss over steps."""
    points = [(float(s.step), math.nan if s.loss is None else s.loss) for s in run.summary.steps]
    bad = [int(step) for step, loss in points if not math.isfinite(loss)]
    finite = [loss for _, loss in points if math.isfinite(loss)]
    log = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > LOG_RATIO
    style = LineStyle(x_title="step", y_title="loss per token", log=log, moments=run.record.moments)
    validated = [(float(s.step), s.validation_loss) for s in run.summary.steps if s.validation_loss is not None]
    series = [Series(name="loss", points=tuple(points))]
    series += [Series(name="validation loss", points=tuple(validated))] if validated else []
    return Figure(
        title="Loss",
        caption=f"Not finite in {len(bad)} of {len(points)} steps, first in step {bad[0]}." if bad else "",
        chart=line_chart(series, label="Loss per token over steps", style=style),
        missing=f"One finite value: {number(finite[0])}." if len(finite) == 1 else "No step has a finite loss.",
    )


def step_figures(run: RunReport) -> list[Figure]:
    """The timelines of a typical and of the worst step; one figure when they are the same step."""
    measured = run.record.timelines
    among = measured or run.predicted
    typical, worst = typical_step(run.summary, among), worst_step(run.summary, measured)
    if typical is None:
        return [Figure(title="A typical step", missing=NO_TIMELINES)]
    figures = [_step_figure(run, typical, "A typical step", "its time is the closest to the median")]
    if worst is not None and worst != typical:
        figures.append(_step_figure(run, worst, "The worst step", "it loses the most time to idling"))
    return figures


def more_step_figures(run: RunReport) -> list[Figure]:
    """The timelines of further steps, evenly chosen, of which the reader picks one."""
    return [_step_figure(run, step, f"Step {step:,}", "one of an even choice") for step in steps_to_pick(run.record)]


def kept_timelines(run: RunReport) -> str:
    """A sentence on the steps whose timelines are kept, where they are not all; empty otherwise."""
    num_timelines, num_steps = len(run.record.timelines), len(run.record.rows)
    if not 0 < num_timelines < num_steps:
        return ""
    return (
        f"Timelines of {num_timelines:,} of {num_steps:,} steps are kept; older ones are thinned to bound their files."
    )


def _step_figure(run: RunReport, step: int, title: str, reason: str) -> Figure:
    measured, predicted = run.record.timelines.get(step), run.predicted.get(step)
    sentences = [f"Step {step:,}: {reason}."]
    if measured:
        sentences.append(f"{share(measured.idle_fraction)} of its device time is idle.")
    if measured and predicted and measured.step_time_s:
        error = predicted.step_time_s / measured.step_time_s - 1.0
        sentences.append(
            f"Predicted {seconds(predicted.step_time_s)}, measured {seconds(measured.step_time_s)} "
            f"({share(error, signed=True)})."
        )
    if not measured:
        sentences.append(NO_TIMELINES)
    if (any_one := measured or predicted) and any_one.num_ranks > MOST_ROWS:
        sentences.append(f"Shown are {MOST_ROWS} of {any_one.num_ranks} ranks, from the busiest to the least busy.")
    if words := coarseness(measured) or coarseness(predicted):
        sentences.append(words)
    return Figure(
        title=title,
        caption=" ".join(sentences),
        chart=gantt_chart(measured, predicted, label=f"Timeline of step {step} by rank, measured and predicted"),
        missing="The timeline has no spans.",
    )


def share_figures(run: RunReport) -> list[Figure]:
    """Idle share and padding share over steps."""
    idle = [(float(s.step), s.idle_fraction) for s in run.summary.timed if s.idle_fraction is not None]
    padding = [(float(s.step), s.padding_fraction) for s in run.summary.steps if s.padding_fraction is not None]
    return [
        _share_figure(run, "Idle share", "of the device time", idle, NO_TIMELINES),
        _share_figure(run, "Padding share", "of the computed tokens", padding, "The run did not record its padding."),
    ]


def _share_figure(run: RunReport, title: str, whole: str, points: list[tuple[float, float]], missing: str) -> Figure:
    style = LineStyle(
        x_title="step", y_title=f"share {whole}", y_labels=share_labels, value=share, zero=True, height=150,
        moments=run.record.moments,
    )  # fmt: skip
    values = [value for _, value in points]
    if values and not any(values):
        return Figure(title=title, missing=f"Zero in every step: none {whole}.")
    return Figure(
        title=title,
        chart=line_chart([Series(name=title, points=tuple(points))], label=f"{title} over steps", style=style),
        missing=f"One step: {share(values[0])} {whole}." if len(values) == 1 else missing,
    )


def prediction_figure(run: RunReport) -> Figure:
    """Predicted against measured step time."""
    predictions = [
        (s.step, s.predicted_s, s.time_s) for s in run.summary.timed if s.predicted_s is not None and s.time_s
    ]
    points = [(step, float(predicted), float(measured)) for step, predicted, measured in predictions]
    near = sum(abs(p / m - 1.0) <= BAND for _, p, m in points)
    return Figure(
        title="Predicted and measured step time",
        caption=f"{near:,} of {len(points):,} steps are predicted within {rough_share(BAND)}. "
        "Above the diagonal a step was slower than predicted.",
        chart=scatter_chart(points, label="Predicted against measured step time, one dot a step"),
        missing="No step has both a predicted and a measured time.",
    )


def slowest_rows(steps: list[StepSummary]) -> list[tuple[str, ...]]:
    """The table of the slowest steps: one row of text each."""
    return [
        (
            f"{s.step:,}", seconds(s.time_s), seconds(s.predicted_s), share(s.prediction_error, signed=True),
            share(s.idle_fraction), share(s.padding_fraction),
            "n/a" if s.num_sequences is None else f"{s.num_sequences:,}",
            "n/a" if s.max_length is None else f"{s.max_length:,}",
            "n/a" if s.num_tokens is None else f"{s.num_tokens:,}",
        )
        for s in steps
    ]  # fmt: skip


SLOWEST_COLUMNS = ("step", "measured", "predicted", "error", "idle", "padding", "sequences", "longest", "tokens")
