"""The page and the trace of one run, or of several side by side; needs no torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.timeline import Timeline
from lengthwise.report.chrome_trace import MOST_SPANS, chrome_trace, packed
from lengthwise.report.kineto import write_kineto
from lengthwise.report.pages.run_figures import RunReport
from lengthwise.report.pages.run_page import render_page
from lengthwise.report.pages.runs_table import labels
from lengthwise.report.record import RunRecord, read_record
from lengthwise.report.run_summary import RunSummary, steps_to_pick, summarise_record, typical_step, worst_step
from lengthwise.report.trace_choice import TraceChoice
from lengthwise.report.whole_file import write_whole
from lengthwise.sim.engine import simulate

_ALL = TraceChoice()


def write_report(
    runs: list[Path],
    page_path: Path,
    trace_path: Path,
    *,
    warmup: int = 1,
    choice: TraceChoice = _ALL,
    kineto: Path | None = None,
) -> list[RunSummary]:
    """Write the page and the trace of ``runs``, and return their figures.

    Args:
        runs: run folders.
        page_path: where the page goes.
        trace_path: where the trace goes.
        warmup: first steps that the speed figures leave out.
        choice: steps and ranks of the trace.
        kineto: a folder for the measured steps as PyTorch's profiler writes them, one file per rank; of one run.

    Raises:
        InputError: a run cannot be read, a chosen step or rank is not in it, or a place cannot be written.
    """
    reports, traced = [], []
    for path in runs:
        report, steps = _report(RunFolder(path), warmup, choice)
        reports.append(report)
        traced.append(steps)
    note = _trace_note(reports, traced)
    page = render_page(reports, trace=trace_path.name, trace_note=note)
    trace = packed(_trace(reports, traced, choice), name=trace_path.name)
    if kineto is not None:
        measured, plans = reports[0].record.timelines, reports[0].record.plans
        timelines = [measured[step] for step in traced[0] if step in measured]
        write_kineto(kineto, timelines, plans=plans, ranks=choice.ranks_among(reports[0].summary.num_ranks))
    write_whole({trace_path: trace, page_path: page.encode()})
    return [report.summary for report in reports]


def _report(folder: RunFolder, warmup: int, choice: TraceChoice) -> tuple[RunReport, list[int]]:
    """What the page shows of a run, and the steps its trace holds: those chosen, or the last ones that viewers bear."""
    record = read_record(folder)
    summary = summarise_record(record, warmup=warmup)
    choice.check(steps=[row["step"] for row in record.rows], num_ranks=summary.num_ranks)
    traced: list[int] = []
    num_spans = 0
    for row in reversed(record.rows):
        if not choice.has_step(row["step"]):
            continue
        timeline = record.timelines.get(row["step"])
        num_spans += sum(choice.has_rank(span.rank) for span in timeline.spans) if timeline else 0
        if traced and num_spans > MOST_SPANS:
            break
        traced.append(row["step"])
    among = record.timelines or record.plans
    shown = {typical_step(summary, among), worst_step(summary, record.timelines), *steps_to_pick(record), *traced}
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


def _trace(reports: list[RunReport], traced: list[list[int]], choice: TraceChoice) -> dict[str, Any]:
    """One trace of all runs."""
    names = labels([report.summary for report in reports]) if len(reports) > 1 else [""]
    trace = chrome_trace([])
    next_pid = 1
    for report, steps, name in zip(reports, traced, names):
        measured = [report.record.timelines[step] for step in steps if step in report.record.timelines]
        predicted = [report.predicted[step] for step in steps if step in report.predicted]
        ranks = choice.ranks_among(report.summary.num_ranks)
        events = chrome_trace(
            measured, predicted=predicted, plans=report.record.plans, ranks=ranks, run=name, first_pid=next_pid
        )["traceEvents"]
        trace["traceEvents"] += events
        next_pid = 1 + max((event["pid"] for event in events), default=next_pid - 1)
    return trace


def _trace_note(reports: list[RunReport], traced: list[list[int]]) -> str:
    notes = []
    for report, steps in zip(reports, traced):
        recorded = [row["step"] for row in report.record.rows]
        if len(steps) < len(recorded):
            last = "the last " if steps == recorded[-len(steps) :] else ""
            notes.append(f"It holds {last}{len(steps):,} of {len(recorded):,} steps.")
    return " ".join(notes)
