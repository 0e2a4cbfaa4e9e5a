"""The outcome of the sweep over transformers' classes as Markdown.

    python benchmarks/families_table.py benchmarks/results/families.jsonl

The last row of a class on a number of ranks in the files counts. ``--rows`` prints the rows instead.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from textwrap import fill
from typing import Any

KINDS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "tokens": "token classification",
    "sequences": "sequence classification",
}
RELATIVE = (
    "Models are as their configuration class has them. Deberta and DebertaV2 with relative_attention=True, as "
    "published checkpoints have it, attend by trained biases: exact, each sequence on one rank."
)
"""What published models of classes are otherwise than those that are swept."""
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


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each class on each number of ranks, by kind and name."""
    kinds = list(KINDS)
    of_trial = {(kinds.index(row["kind"]), row["name"], row["ranks"]): row for row in rows}
    return [row for _, row in sorted(of_trial.items())]


def table(rows: list[dict[str, Any]]) -> str:
    """Counts by kind and number of ranks, then the classes by outcome."""
    worst = worst_by_class(rows)
    lines = [f"| | ranks | {' | '.join(OUTCOMES)} |", f"| --- | --- |{' --- |' * len(OUTCOMES)}"]
    counts = Counter((row["kind"], row["ranks"], row["outcome"]) for row in rows)
    for kind, ranks in sorted({(list(KINDS).index(row["kind"]), row["ranks"]) for row in rows}):
        title = list(KINDS)[kind]
        cells = " | ".join(str(counts[title, ranks, outcome]) for outcome in OUTCOMES)
        lines.append(f"| {KINDS[title]} | {ranks} | {cells} |")
    for kind, title in KINDS.items():
        exact = sorted((name, row) for (of, name), row in worst.items() if of == kind and row["outcome"] == "exact")
        shared = [_short(name) for name, row in exact if max(row["degrees"]) > 1]
        alone = [_short(name) for name, row in exact if max(row["degrees"]) == 1]
        if shared:
            lines += [
                "",
                f"{_title(title)}, exact, and ranks may share a sequence ({len(shared)}): {', '.join(shared)}.",
            ]
        if alone:
            lines += ["", f"{_title(title)}, exact, each sequence on one rank ({len(alone)}): {', '.join(alone)}."]
    lines += ["", RELATIVE]
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
    return "\n".join(line if line.startswith("|") else fill(line, 120, break_on_hyphens=False) for line in lines)


def _short(name: str) -> str:
    """A class without the end that all of its kind have."""
    return name.removesuffix("ForTokenClassification").removesuffix("ForSequenceClassification")


def _title(title: str) -> str:
    return title[0].upper() + title[1:]


def reason_of(message: str, name: str) -> str:
    """A message with the name of the class taken out, so that equal reasons meet."""
    sentence = message.split("; ")[0].replace(name, "it")
    return sentence[:200]


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:] if name != "--rows"]
    read = latest([json.loads(line) for file in files for line in file.read_text().splitlines()])
    text = "\n".join(json.dumps(row) for row in read) if "--rows" in sys.argv else table(read)
    sys.stdout.write(text + "\n")
