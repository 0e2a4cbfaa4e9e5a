"""The page and the trace of one run, or of several side by side; needs no torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.timeline import Timeline
from lengthwise.report.chrome_trace import MOST_SPANS, chrome_trace, packed
from lengthwise.report.pages.run_figures import RunReport
from lengthwise.report.pages.run_page import render_page
from lengthwise.report.pages.runs_table import labels
from lengthwise.report.record import RunRecord, read_record
from lengthwise.report.run_summary import RunSummary, summarise_record, typical_step, worst_step
from lengthwise.report.whole_file import write_whole
from lengthwise.sim.engine import simulate


def write_report(runs: list[Path], page_path: Path, trace_path: Path, *, warmup: int = 1) -> list[RunSummary]:
    """Write the page and the trace of ``runs``, and return their figures."""
    reports, traced = [], []
    for path in runs:
        report, steps = _report(RunFolder(path), warmup)
        reports.append(report)
        traced.append(steps)
    note = _trace_note(reports, traced)
    page = render_page(reports, trace=trace_path.name, trace_note=note)
    write_whole({trace_path: packed(_trace(reports, traced)), page_path: page.encode()})
    return [report.summary for report in reports]


def _report(folder: RunFolder, warmup: int) -> tuple[RunReport, list[int]]:
    """What the page shows of a run, and the steps its trace holds: the last ones, as many as viewers bear."""
    record = read_record(folder)
    summary = summarise_record(record, warmup=warmup)
    traced: list[int] = []
    num_spans = 0
    for row in reversed(record.rows):
        timeline = record.timelines.get(row["step"])
        num_spans += len(timeline.spans) if timeline else 0
        if traced and num_spans > MOST_SPANS:
            break
        traced.append(row["step"])
    among = record.timelines or record.plans
    shown = {typical_step(summary, among), worst_step(summary, record.timelines), *traced}
    predicted = _predict(record, [step for step in shown if step is not None])
    return RunReport(record=record, summary=summary, predicted=predicted), sorted(traced)


def _predict(record: RunRecord, steps: Iterable[int]) -> dict[int, Timeline]:
    """Simulated timelines of the steps whose plans can be simulated."""
    timelines = {}
    for step in sorted(steps):
        if step in record.plans:
            try:
                timelines[step] = simulate(record.plans[step])
            except InputError:
                return {}  # a scheme that the simulator does not know yet: the page goes without predicted timelines
    return timelines


def _trace(reports: list[RunReport], traced: list[list[int]]) -> dict[str, Any]:
    """One trace of all runs."""
    names = labels([report.summary for report in reports]) if len(reports) > 1 else [""]
    whole: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    next_pid = 0
    for report, steps, name in zip(reports, traced, names):
        measured = [report.record.timelines[step] for step in steps if step in report.record.timelines]
        predicted = [report.predicted[step] for step in steps if step in report.predicted]
        events = chrome_trace(measured, predicted=predicted, run=name, first_pid=next_pid)["traceEvents"]
        whole["traceEvents"] += events
        next_pid = 1 + max((event["pid"] for event in events), default=next_pid - 1)
    return whole


def _trace_note(reports: list[RunReport], traced: list[list[int]]) -> str:
    cut = [(len(steps), len(r.record.rows)) for r, steps in zip(reports, traced) if len(steps) < len(r.record.rows)]
    return " ".join(f"It holds the last {kept:,} of {all_steps:,} steps." for kept, all_steps in cut)
