"""`lengthwise demo`: the main job on real text, from nothing: index, profile, train three ways, compare, report."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.commands import profile
from lengthwise.cli.launch import check_torch
from lengthwise.cli.tables.demo_table import print_demo
from lengthwise.cli.tables.index_table import print_index
from lengthwise.cli.train_config import launch
from lengthwise.core.run_folder import RunFolder
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import open_index
from lengthwise.session.console import emit_json, stderr
from lengthwise.session.demo_settings import DEMO_LENGTHS, NUM_RANKS, POLICIES, demo_config
from lengthwise.session.index_corpus import index_corpus
from lengthwise.session.run_report import write_report

TRACE = "trace.json.gz"


def run(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("outputs/demo"),
    steps: Annotated[int, typer.Option(min=2, help="steps under each policy")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Train one small Llama on this Python's own standard library under three policies, on the same sequences."""
    check_torch()
    log = stderr()
    log.print("1/4 index the standard library (byte-level BPE of 8,192 entries, trained on it)")
    built = index_corpus(IndexSettings(source=None, train_bpe=8192), out / "index", workers=None, restart=False)
    print_index(open_index(out / "index"), built, shows_next=False)
    runs = out / datetime.now().strftime("%Y%m%d-%H%M%S")
    runs.mkdir(parents=True)
    config = demo_config(out / "index", runs / "profile.json", steps, **DEMO_LENGTHS)
    config.save(runs / "demo.yaml")
    log.print(f"2/4 profile {config.model.preset} on {NUM_RANKS} ranks, alone and together")
    profile.run(runs / "demo.yaml", [], out=runs / "profile.json", nproc=NUM_RANKS, repeats=1)
    folders = []
    for policy in POLICIES:
        log.print(f"3/4 train {steps} steps, policy {policy}")
        folder = RunFolder(runs / policy)
        launch(
            folder,
            [str(runs / "demo.yaml"), f"plan.policy={policy}", f"name={policy}"],
            nproc=NUM_RANKS,
            shows_next=False,
        )
        folders.append(folder.path)
    log.print("4/4 report")
    page = runs / "report.html"
    summaries = write_report(folders, page, page.with_name(TRACE))
    if as_json:
        emit_json({"runs": [summary.to_json() for summary in summaries], "report": str(page)})
    else:
        print_demo(summaries, page, page.with_name(TRACE))
