"""The outcome of the sweep over transformers' classes as Markdown: ``python benchmarks/families_table.py FILE``."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

KINDS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "tokens": "token classification",
    "sequences": "sequence classification",
}
OUTCOMES = ("exact", "refused", "wrong", "failed", "not built")


def worst_by_class(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """For each class the worst outcome over the numbers of ranks, with all degrees that were exact."""
    order = ("failed", "wrong", "refused", "exact", "not built")
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["kind"], row["name"]
        previous = worst.setdefault(key, row)
        degrees = {*previous["degrees"], *row["degrees"]}
        least = min(previous, row, key=lambda candidate: order.index(candidate["outcome"]))
        worst[key] = {**least, "degrees": sorted(degrees), "error": max(previous["error"] or 0, row["error"] or 0)}
    return worst


def table(rows: list[dict[str, Any]]) -> str:
    """Counts by kind, then the classes by outcome."""
    worst = worst_by_class(rows)
    lines = [f"| | {' | '.join(OUTCOMES)} |", f"| --- |{' --- |' * len(OUTCOMES)}"]
    for kind, title in KINDS.items():
        outcomes = [row["outcome"] for (of_kind, _), row in worst.items() if of_kind == kind]
        if outcomes:
            lines.append(f"| {title} | {' | '.join(str(outcomes.count(name)) for name in OUTCOMES)} |")
    shared, alone = [], []
    for (_, name), row in sorted(worst.items()):
        if row["outcome"] == "exact":
            (shared if max(row["degrees"]) > 1 else alone).append(name)
    lines += ["", f"Exact, and ranks may share a sequence ({len(shared)}): {', '.join(shared)}."]
    lines += ["", f"Exact, each sequence on one rank ({len(alone)}): {', '.join(alone)}."]
    by_reason = defaultdict(list)
    for (_, name), row in sorted(worst.items()):
        if row["outcome"] in ("refused", "wrong", "failed"):
            by_reason[row["outcome"], reason_of(row["message"], name)].append(name)
    for (outcome, reason), names in sorted(by_reason.items(), key=lambda entry: -len(entry[1])):
        lines += ["", f"{outcome.capitalize()} ({len(names)}): {', '.join(names)}: {reason}"]
    missing = [name for (_, name), row in sorted(worst.items()) if row["outcome"] == "not built"]
    lines += [
        "",
        f"Not tried, because no tiny model of the class computes a loss here ({len(missing)}): {', '.join(missing)}.",
    ]
    return "\n".join(lines)


def reason_of(message: str, name: str) -> str:
    """A message with the name of the class taken out, so that equal reasons meet."""
    sentence = message.split("; ")[0].replace(name, "it")
    return sentence[:200]


if __name__ == "__main__":
    sys.stdout.write(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]) + "\n")
