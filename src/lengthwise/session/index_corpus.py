"""Build an index with a progress bar, and the document that says what it holds."""

import os
from pathlib import Path
from typing import Any

from lengthwise.index.build import BuiltIndex, build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import TokenStore
from lengthwise.session.console import progress


def index_corpus(settings: IndexSettings, out: Path, *, workers: int | None, restart: bool) -> BuiltIndex:
    """Build the index of a request in the folder ``out``, in one process per core unless ``workers`` says otherwise.

    Raises:
        InputError: the source or a setting cannot be used, or ``out`` holds something else.
    """
    with progress() as bar:
        task = bar.add_task("reading the source", total=None)

        def show(stage: str, num_done: int, num_units: int) -> None:
            bar.update(task, description=stage, completed=num_done, total=num_units)

        count = _num_cores() if workers is None else workers
        return build_index(settings, out, workers=count, restart=restart, on_progress=show)


def index_document(store: TokenStore, *, built: BuiltIndex | None = None) -> dict[str, Any]:
    """What ``lengthwise index --json`` says of an index."""
    names = (
        "num_sequences", "num_tokens", "max_length", "digest", "vocab_size", "eos_id", "dtype", "has_tokens",
        "tokenizer", "ledger",
    )  # fmt: skip
    document = {"path": str(store.path), **{name: store.info[name] for name in names}}
    if store.has_loss_mask:
        document["num_loss_tokens"] = store.info["num_loss_tokens"]
    if unused := store.info.get("unused_columns"):
        document["unused_columns"] = unused
    if built is not None:
        document |= {"up_to_date": built.was_up_to_date, "num_resumed_units": built.num_resumed_units}
    return document


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
