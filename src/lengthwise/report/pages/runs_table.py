"""Several runs side by side: a sentence, a table, bars and the losses over the same tokens."""

import math
from collections.abc import Sequence
from itertools import accumulate

from lengthwise.report.charts.bars import bar_chart
from lengthwise.report.charts.lines import LineStyle, Series, line_chart
from lengthwise.report.charts.svg import shortened
from lengthwise.report.charts.ticks import plain_labels
from lengthwise.report.pages.run_figures import Figure, RunReport
from lengthwise.report.run_summary import RunSummary
from lengthwise.report.units import count, number, ratio, seconds, share


def labels(summaries: Sequence[RunSummary]) -> list[str]:
    """A short name for each run: its policy if that tells them apart, else its name, both, its folder, or a number."""
    both = [f"{s.name} {s.policy}" for s in summaries]
    for names in ([s.policy for s in summaries], [s.name for s in summaries], both, [s.path for s in summaries]):
        if len(set(names)) == len(names):
            return names
    return [f"{k}: {name}" for k, name in enumerate(both, start=1)]


def columns(summaries: Sequence[RunSummary]) -> tuple[str, ...]:
    """The head of :func:`table`; policies have a column unless they are the runs' labels."""
    policy = () if labels(summaries) == [s.policy for s in summaries] else ("policy",)
    figures = ("tokens/s", "ratio", "idle", "padding", "step time", "predicted", "gap", "final loss")
    return ("run", *policy, *figures)


def table(summaries: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """One row of text a run."""
    with_policy = "policy" in columns(summaries)
    first = summaries[0].tokens_per_s
    rows = []
    for label, s in zip(labels(summaries), summaries):
        times = s.tokens_per_s / first if s.tokens_per_s and first else None
        speeds = (count(s.tokens_per_s), ratio(times))
        shares = (share(s.idle_fraction), share(s.padding_fraction))
        times_s = (seconds(s.step_time_s), seconds(s.predicted_step_time_s))
        policy = (s.policy,) if with_policy else ()
        rows.append((shortened(label, 60), *policy, *speeds, *shares, *times_s, share(s.gap), number(s.final_loss)))
    return rows


def verdict(summaries: Sequence[RunSummary]) -> str:
    """The comparison in one sentence; empty when speeds are not known."""
    speeds = [(s.tokens_per_s, label) for s, label in zip(summaries, labels(summaries)) if s.tokens_per_s]
    if len(speeds) < 2:
        return ""
    (highest, best), (least, last) = max(speeds), min(speeds)
    return f"{best} trains {highest / least:.2f} times as many tokens per second as {last}." if highest > least else ""


def figures(runs: Sequence[RunReport]) -> list[Figure]:
    """Speed, idle share and padding share as bars."""
    summaries = [run.summary for run in runs]
    names = labels(summaries)
    missing = "Not recorded."
    return [
        Figure(
            title="Tokens per second",
            missing=missing,
            chart=bar_chart(
                [(name, s.tokens_per_s) for name, s in zip(names, summaries)],
                label="Tokens per second of each run", quantity="tokens/s", value=count, relative=True,
            ),
        ),
        Figure(
            title="Idle share",
            missing="No run recorded timelines.",
            chart=bar_chart(
                [(name, s.idle_fraction) for name, s in zip(names, summaries)],
                label="Idle share of each run", quantity="idle", value=share, full=1.0,
            ),
        ),
        Figure(
            title="Padding share",
            missing=missing,
            chart=bar_chart(
                [(name, s.padding_fraction) for name, s in zip(names, summaries)],
                label="Padding share of each run", quantity="padding", value=share, full=1.0,
            ),
        ),
    ]  # fmt: skip


def loss_figure(runs: Sequence[RunReport]) -> Figure:
    """The losses of all runs over the tokens trained so far."""
    names = labels([run.summary for run in runs])
    series = [Series(name=name, points=_over_tokens(run.summary)) for name, run in zip(names, runs)]
    style = LineStyle(x_title="tokens trained", y_title="loss per token", x_labels=plain_labels)
    return Figure(
        title="Loss over tokens",
        caption="Runs that train the same sequences in the same order lie on top of each other: a plan changes where "
        "a sequence is computed, not what is learned.",
        chart=line_chart(series, label="Loss of each run over the tokens trained", style=style),
        missing="No run has a finite loss.",
    )


def _over_tokens(summary: RunSummary) -> tuple[tuple[float, float], ...]:
    trained = accumulate(step.num_tokens or 0 for step in summary.steps)
    return tuple(
        (float(tokens), math.nan if step.loss is None else step.loss) for tokens, step in zip(trained, summary.steps)
    )
