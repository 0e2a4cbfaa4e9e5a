"""`lengthwise demo`: the main job on real text, from nothing: index, profile, train three ways, compare, report."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli.commands import index, profile
from lengthwise.cli.launch import check_torch
from lengthwise.cli.train_config import launch
from lengthwise.core.run_folder import RunFolder
from lengthwise.session.console import emit_json, stderr, stdout
from lengthwise.session.demo_settings import NUM_RANKS, POLICIES, demo_config, demo_share
from lengthwise.session.run_report import write_report

if TYPE_CHECKING:
    from lengthwise.report.run_summary import RunSummary

TRACE = "trace.json.gz"
LIMITS = (
    "What this can show: padding costs time, and any plan trains the same. What it cannot: "
    f"{NUM_RANKS} CPU ranks compete for one machine's cores and memory and leave few plans to choose from, so "
    "sharing a sequence hardly pays, and in runs this short static may be ahead of auto. "
    "For your lengths and GPUs, simulated: lengthwise compare"
)
"""Stands beside the table, which may show the default policy behind a simpler one."""


def run(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("outputs/demo"),
    steps: Annotated[int, typer.Option(min=2, help="steps under each policy")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Train one small Llama on this Python's own standard library under three policies, on the same sequences."""
    check_torch()
    log = stderr()
    log.print("1/4 index the standard library (byte-level BPE of 8,192 entries, trained on it)")
    index.run(out=out / "index", python_stdlib=True, train_bpe=8192)
    runs = out / datetime.now().strftime("%Y%m%d-%H%M%S")
    runs.mkdir(parents=True)
    config = demo_config(out / "index", runs / "profile.json", steps)
    config.save(runs / "demo.yaml")
    log.print(f"2/4 profile {config.model.preset} on {NUM_RANKS} ranks")
    max_tokens = demo_share(config)
    profile.run(runs / "demo.yaml", [], out=runs / "profile.json", nproc=NUM_RANKS, max_tokens=max_tokens, repeats=2)
    folders = []
    for policy in POLICIES:
        log.print(f"3/4 train {steps} steps, policy {policy}")
        folder = RunFolder(runs / policy)
        launch(folder, [str(runs / "demo.yaml"), f"plan.policy={policy}", f"name={policy}"], nproc=NUM_RANKS)
        folders.append(folder.path)
    log.print("4/4 report")
    page = runs / "report.html"
    summaries = write_report(folders, page, page.with_name(TRACE))
    if as_json:
        emit_json({"runs": [summary.to_json() for summary in summaries], "report": str(page)})
    else:
        _print(summaries, page)


def _print(summaries: list["RunSummary"], page: Path) -> None:
    from rich.table import Table

    from lengthwise.report.units import count, seconds, share

    title = f"\nthe same sequences under {len(summaries)} policies, {NUM_RANKS} ranks, one thread each"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("policy")
    for heading in ("tokens/s", "speed-up", "padding", "idle", "predicted", "measured", "error"):
        shown.add_column(heading, justify="right")
    for summary in summaries:
        ratio = (summary.tokens_per_s or 0.0) / (summaries[0].tokens_per_s or 1.0)
        shown.add_row(
            summary.policy, count(summary.tokens_per_s), f"{ratio:.2f}x", share(summary.padding_fraction),
            share(summary.idle_fraction), seconds(summary.predicted_step_time_s), seconds(summary.step_time_s),
            share(summary.prediction_error),
        )  # fmt: skip
    console = stdout()
    console.print(shown)
    console.print(LIMITS, soft_wrap=True)
    console.print(f"report: {page}\ntrace:  {page.with_name(TRACE)} (opens in ui.perfetto.dev)", soft_wrap=True)
