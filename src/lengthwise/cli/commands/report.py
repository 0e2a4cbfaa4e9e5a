"""``lengthwise report``: one HTML page and one trace of one run, or of several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.core.run_folder import RunFolder
from lengthwise.session.console import emit_json


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
    from lengthwise.cli.tables.report_table import print_runs
    from lengthwise.session.run_report import write_report

    for path in runs:
        RunFolder(path).check()
    page_path, trace_path = _places(runs, out)
    summaries = write_report(runs, page_path, trace_path, warmup=warmup)
    if json:
        emit_json({"runs": [s.to_json() for s in summaries], "report": str(page_path), "trace": str(trace_path)})
    else:
        print_runs(summaries, page_path, trace_path)


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
