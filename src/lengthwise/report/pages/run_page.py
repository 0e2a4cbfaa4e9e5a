"""The page: one HTML file that needs no network, and no script to be read."""

from collections.abc import Sequence
from typing import Any

from lengthwise.report.pages import run_figures as figures
from lengthwise.report.pages import run_text as words
from lengthwise.report.pages import runs_table as compare
from lengthwise.report.pages.history_figures import history_figures
from lengthwise.report.pages.run_figures import RunReport
from lengthwise.report.pages.templates import render
from lengthwise.report.run_summary import slowest_steps


def render_page(runs: Sequence[RunReport], *, trace: str = "", trace_note: str = "") -> str:
    """The report of one run, or the comparison of several followed by each; all text is escaped.

    Args:
        runs: at least one.
        trace: name of the trace file beside the page; empty: there is none.
        trace_note: which steps the trace holds, a sentence.
    """
    assert runs, "a report needs a run"
    names = compare.labels([run.summary for run in runs])
    is_alone = len(runs) == 1
    return render(
        "report.html.j2",
        title=runs[0].summary.name if len(runs) == 1 else f"{len(runs)} runs compared",
        comparison=_comparison(runs) if len(runs) > 1 else None,
        runs=[
            _section(run, run.summary.name if is_alone else name, is_alone=is_alone) for run, name in zip(runs, names)
        ],
        trace=trace,
        trace_note=trace_note,
    )


def _comparison(runs: Sequence[RunReport]) -> dict[str, Any]:
    summaries = [run.summary for run in runs]
    return {
        "verdict": compare.verdict(summaries),
        "columns": compare.columns(summaries),
        "rows": compare.table(summaries),
        "figures": compare.figures(runs),
        "loss": compare.loss_figure(runs),
    }


def _section(run: RunReport, label: str, *, is_alone: bool) -> dict[str, Any]:
    record, summary = run.record, run.summary
    return {
        "label": label,
        "name": summary.name,
        "headline": words.headline(summary, label=label),
        "alarm": words.alarm(record, summary),
        "tiles": words.tiles(summary),
        "facts": words.what_ran(record, summary),
        "time": figures.time_figure(run),
        "lengths": figures.length_figure(run),
        "loss": figures.loss_figure(run),
        "steps": figures.step_figures(run),
        "more_steps": figures.more_step_figures(run) if is_alone else [],
        "kept_timelines": figures.kept_timelines(run),
        "history": history_figures(run),
        "shares": figures.share_figures(run),
        "prediction": figures.prediction_figure(run),
        "slowest_columns": figures.SLOWEST_COLUMNS,
        "slowest": figures.slowest_rows(slowest_steps(summary)),
        "samples": words.shown_samples(record),
        "config": record.config_text,
    }
