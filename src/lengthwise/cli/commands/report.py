"""``lengthwise report``: one HTML page and one trace of one run, or of several side by side."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.timeline import Timeline
from lengthwise.session.console import emit_json, stdout

if TYPE_CHECKING:
    from lengthwise.report.pages.run_figures import RunReport
    from lengthwise.report.record import RunRecord
    from lengthwise.report.run_summary import RunSummary

MOST_SPANS = 300_000
"""Measured spans in a trace; more make a file that viewers choke on."""


def run(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is what the others compare to.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run, or for several runs, here.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="First steps that the speed figures leave out.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Write one HTML page and a trace of a run."""
    for path in runs:
        RunFolder(path).check()
    page_path, trace_path = _places(runs, out)
    summaries = write(runs, page_path, trace_path, warmup=warmup)
    if json:
        emit_json({"runs": [s.to_json() for s in summaries], "report": str(page_path), "trace": str(trace_path)})
    else:
        _print(summaries, page_path, trace_path)


def write(runs: list[Path], page_path: Path, trace_path: Path, *, warmup: int = 1) -> list["RunSummary"]:
    """Write the page and the trace of ``runs``, and return their figures."""
    from lengthwise.report.chrome_trace import packed
    from lengthwise.report.pages.run_page import render_page
    from lengthwise.report.whole_file import write_whole

    reports, traced = [], []
    for path in runs:
        report, steps = _report(RunFolder(path), warmup)
        reports.append(report)
        traced.append(steps)
    note = _trace_note(reports, traced)
    page = render_page(reports, trace=trace_path.name, trace_note=note)
    write_whole({trace_path: packed(_trace(reports, traced)), page_path: page.encode()})
    return [report.summary for report in reports]


def _places(runs: list[Path], out: Path | None) -> tuple[Path, Path]:
    """Where the page and the trace go."""
    from lengthwise.report.whole_file import check_place

    if out is not None:
        page, trace = out, out.with_name(f"{out.stem}.trace.json.gz")
    elif len(runs) == 1:
        page, trace = RunFolder(runs[0]).report, RunFolder(runs[0]).trace
    else:
        page, trace = Path("report.html"), Path("report.trace.json.gz")
    check_place(page, "--out")
    return page, trace


def _report(folder: RunFolder, warmup: int) -> tuple["RunReport", list[int]]:
    """What the page shows of a run, and the steps its trace holds: the last ones, as many as viewers bear."""
    from lengthwise.report.pages.run_figures import RunReport
    from lengthwise.report.record import read_record
    from lengthwise.report.run_summary import summarise_record, typical_step, worst_step

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


def _predict(record: "RunRecord", steps: Iterable[int]) -> dict[int, Timeline]:
    """Simulated timelines of the steps whose plans can be simulated."""
    from lengthwise.sim.engine import simulate

    timelines = {}
    for step in sorted(steps):
        if step in record.plans:
            try:
                timelines[step] = simulate(record.plans[step])
            except InputError:
                return {}  # a scheme that the simulator does not know yet: the page goes without predicted timelines
    return timelines


def _trace(reports: list["RunReport"], traced: list[list[int]]) -> dict[str, Any]:
    """One trace of all runs."""
    from lengthwise.report.chrome_trace import chrome_trace
    from lengthwise.report.pages.runs_table import labels

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


def _trace_note(reports: list["RunReport"], traced: list[list[int]]) -> str:
    cut = [(len(steps), len(r.record.rows)) for r, steps in zip(reports, traced) if len(steps) < len(r.record.rows)]
    return " ".join(f"It holds the last {kept:,} of {all_steps:,} steps." for kept, all_steps in cut)


def _print(summaries: list["RunSummary"], page: Path, trace: Path) -> None:
    """A table with a column a run."""
    from rich.table import Table

    from lengthwise.report.pages.runs_table import labels
    from lengthwise.report.units import count, number, seconds, share

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for label in labels(summaries) if len(summaries) > 1 else [summaries[0].name]:
        table.add_column(label, justify="right", overflow="fold")
    for words, of in (
        ("policy", lambda s: s.policy),
        ("ranks", lambda s: count(s.num_ranks)),
        ("steps", lambda s: count(s.num_steps)),
        ("tokens", lambda s: count(s.num_tokens)),
        ("tokens/s", lambda s: count(s.tokens_per_s)),
        ("idle", lambda s: share(s.idle_fraction)),
        ("padding", lambda s: share(s.padding_fraction)),
        ("waiting for data", lambda s: share(s.data_wait)),
        ("step time", lambda s: seconds(s.step_time_s)),
        ("predicted", lambda s: seconds(s.predicted_step_time_s)),
        ("prediction error", lambda s: share(s.prediction_error)),
        ("gap to the bound", lambda s: share(s.gap)),
        ("final loss", lambda s: number(s.final_loss)),
    ):
        table.add_row(words, *map(of, summaries))
    console = stdout()
    console.print(table)
    console.print(f"report  {page}\ntrace   {trace}", soft_wrap=True)
