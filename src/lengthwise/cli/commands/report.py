"""``lengthwise report``: one HTML page and one trace of one run, or of several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.shared_options import Json, KinetoFolder, TraceRanks, TraceSteps
from lengthwise.core.atomic_write import is_stream
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.session.console import emit_json, stderr


def run(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is what the others compare to.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run, or for several runs, here.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="First steps that the speed figures leave out.")] = 1,
    trace_steps: TraceSteps = None,
    trace_ranks: TraceRanks = None,
    kineto: KinetoFolder = None,
    json: Json = False,
) -> None:
    """Write one HTML page and a trace of a run."""
    from lengthwise.cli.tables.report_table import print_runs
    from lengthwise.report.trace_choice import TraceChoice
    from lengthwise.report.whole_file import check_folder
    from lengthwise.session.run_report import write_report

    for path in runs:
        RunFolder(path).check()
    page_path, trace_path = page_and_trace(runs, out)
    check_folder(kineto, "--kineto")
    if kineto is not None and len(runs) > 1:
        raise InputError(f"--kineto takes one run, whose ranks are its files, not {len(runs)}; report each by itself")
    choice = TraceChoice.parse(trace_steps, trace_ranks)
    summaries = write_report(runs, page_path, trace_path, warmup=warmup, choice=choice, kineto=kineto)
    for summary in summaries:
        if summary.missing_steps:
            stderr().print(f"warning: {summary.path}: {summary.missing_in_words}", soft_wrap=True)
    if json:
        emit_json({"runs": [s.to_json() for s in summaries], "report": str(page_path), "trace": str(trace_path)})
    else:
        print_runs(summaries, page_path, trace_path)


def page_and_trace(runs: list[Path], out: Path | None) -> tuple[Path, Path]:
    """Where the page and the trace go; a device or FIFO takes the page alone."""
    from lengthwise.report.whole_file import check_place

    if len(runs) == 1:
        page, trace = RunFolder(runs[0]).report, RunFolder(runs[0]).trace
    else:
        page, trace = Path("report.html"), Path("report.trace.json.gz")
    if out is not None:
        page, trace = out, trace if is_stream(out) else out.with_name(f"{out.stem}.trace.json.gz")
    check_place(page, "--out")
    check_place(trace, "--out")
    return page, trace
