"""Dry runs of tiny models of many classes: are bytes predicted that only a small model's peak shows?

``python benchmarks/dryrun_prepared.py --sweep all`` runs it. Each class is built three layers deep and 64 wide, as
:mod:`tiny_models` has them but for longer sequences. What is there for every pair of tokens, every head or every word
is most of their peak, while it is little beside the weights of a model that is worth training on a GPU.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_models
from dryrun_prepared import Case, rows_of
from tiny_models import ModelClass, all_classes

from lengthwise.core.errors import LengthwiseError

RESULTS = Path(__file__).parent / "results"
TOKENS, POSITIONS, WIDTH, WINDOW, VOCABULARY = 3072, 1024, 64, 256, 512
LOW = 0.9
"""Predicted over counted below which a model could run out of memory that was thought to fit."""
RUNGS = ("", "recompute")


def taken() -> list[ModelClass]:
    """Causal and masked classes that ``prepare`` was seen to train exactly."""
    rows = [json.loads(line) for line in (RESULTS / "families.jsonl").read_text().splitlines()]
    exact = {row["name"] for row in rows if row["outcome"] == "exact" and row["ranks"] == 1}
    return [each for each in all_classes(("causal", "masked")) if each.name in exact]


def document_of(model_class: ModelClass) -> dict[str, Any]:
    """The configuration of a tiny model of the class, as ``config.json`` has it."""
    sizes: dict[str, Any] = tiny_models._SIZES
    changed = {tiny_models.MAX_POSITIONS: POSITIONS, tiny_models.HIDDEN_SIZE: WIDTH, tiny_models.HEAD_SIZE: WIDTH // 4}
    names = {name: changed[size] for name, size in sizes.items() if isinstance(size, int) and size in changed}
    names = {name: size for name, size in names.items() if "mamba" not in name and "state" not in name}
    tiny_models._SIZES, before = {**sizes, **names, "sliding_window": WINDOW}, tiny_models._SIZES
    tiny_models.VOCAB_SIZE, vocabulary = VOCABULARY, tiny_models.VOCAB_SIZE
    try:
        config = tiny_models.tiny_config(model_class.load().config_class)
    finally:
        tiny_models._SIZES, tiny_models.VOCAB_SIZE = before, vocabulary
    if hasattr(config, "is_decoder"):
        config.is_decoder = model_class.kind == "causal"
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [model_class.name]}


def sweep(asked: str) -> None:
    """Run classes, add a row for each to results/dryrun_families.jsonl, and print the table of all."""
    path, classes = RESULTS / "dryrun_families.jsonl", taken()
    for model_class in classes if asked == "all" else [each for each in classes if each.name in asked.split(",")]:
        with path.open("a") as out:
            for row in _rows(model_class):
                out.write(json.dumps(row) + "\n")
    print(table([json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []))


def _rows(model_class: ModelClass) -> Iterator[dict[str, Any]]:
    cases = [Case(weights="whole", degree=1, num_tokens=TOKENS, rung=rung) for rung in RUNGS]
    try:
        for row in rows_of(
            model_class.name, cases, document=document_of(model_class), num_layers=tiny_models.NUM_LAYERS
        ):
            names = ("rung", "peak_total_bytes", "predicted_bytes", "peak_at", "peak_bytes")
            yield {"name": model_class.name} | {name: row[name] for name in names}
    except (LengthwiseError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        yield {"name": model_class.name, "problem": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def table(rows: list[dict[str, Any]]) -> str:
    """Predicted over counted of every class; those that were not run, with the reason, after it."""
    ratios: dict[str, dict[str, float]] = {}
    problems = {row["name"]: row["problem"] for row in rows if "problem" in row}
    for row in rows:
        if "problem" not in row:
            ratios.setdefault(row["name"], {})[row["rung"]] = row["predicted_bytes"] / row["peak_total_bytes"]
    lines = ["| class | keep all | recompute |", "| --- | --- | --- |"]
    for name, of_rungs in sorted(ratios.items(), key=lambda item: min(item[1].values())):
        lines.append(f"| {name} | " + " | ".join(f"{of_rungs[r]:.3f}" if r in of_rungs else "" for r in RUNGS) + " |")
    lines += [f"{name}: {problem}" for name, problem in sorted(problems.items()) if name not in ratios]
    return "\n".join(lines)
