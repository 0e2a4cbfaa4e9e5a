"""Analyze an index in this process, or as one rank of several."""

from filecmp import cmp
from pathlib import Path
from typing import Any

from lengthwise.index.store import TokenStore
from lengthwise.runtime.analyze.analysis import analyze
from lengthwise.runtime.analyze.request import AnalysisRequest
from lengthwise.runtime.comm.activity import told_to_peers
from lengthwise.runtime.comm.world import start_world
from lengthwise.session.console import progress


def analyze_index(request: AnalysisRequest, store: TokenStore, *, device: str, restart: bool) -> dict[str, Any]:
    """Make the metric, with a progress bar on the first rank, and return its figures."""
    world = start_world(device)
    count = len(store)
    with told_to_peers(), progress() as bar:
        task = bar.add_task(request.name, total=None, visible=world.is_first)

        def show(sequences: int, tokens: int, total: int) -> None:
            words = f"{request.name}: {sequences:,}/{count:,} sequences, tokens"
            bar.update(task, completed=tokens, total=total, description=words)

        made = analyze(request, store, world, restart=restart, on_progress=show)
    return {
        "index": str(store.path),
        **made.info,
        "up_to_date": made.was_up_to_date,
        "num_resumed_blocks": made.num_resumed_blocks,
    }


def foreign_tokenizer(request: AnalysisRequest, store: TokenStore) -> str:
    """A warning if the model's token ids are not those of the index; empty if they are."""
    models, indexs = (folder / "tokenizer.json" for folder in (Path(request.target), store.path))
    if request.kind != "loss" or not models.is_file() or (indexs.is_file() and cmp(models, indexs, shallow=False)):
        return ""
    return f"{request.target} has a tokenizer.json that {store.path} was not made with; losses may mean nothing"
