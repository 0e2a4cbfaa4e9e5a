"""Count what the style guide wants fewer of, and fail when a count has risen above `tools/style_counts.json`.

Run by `make lint`. After an improvement: `python tools/style_counts.py --update`.
"""

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
BASELINE = Path(__file__).with_suffix(".json")

VAGUE_NAMES = frozenset(
    {"found", "held", "at", "each", "one", "told", "most", "own", "known", "alike", "whole", "kept", "given"}
)
NO_SUBJECT = re.compile(r"^(Of|That|Those|Its|As|By|From|Ours|In all|The same|The inverse)\b")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS, MIN_DOCSTRING_WORDS = 400, 60, 9, 3


def main(arguments: list[str]) -> int:
    """Compare the counts of the tree with the stored ones; the exit code."""
    places = {name: list(lines) for name, lines in count(SOURCE).items()}
    counts = {name: len(lines) for name, lines in places.items()}
    if "--list" in arguments:
        print("\n".join(f"{name}: {line}" for name, lines in places.items() for line in lines))
    if "--update" in arguments:
        BASELINE.write_text(json.dumps(counts, indent=2) + "\n")
    limits = json.loads(BASELINE.read_text())
    risen = [name for name, number in counts.items() if number > limits.get(name, 0)]
    for name, number in counts.items():
        print(f"{number:5} {name.replace('_', ' ')}" + (f", at most {limits.get(name, 0)}" if name in risen else ""))
    for name in risen:
        print(f"{name} rose; list them with: python tools/style_counts.py --list | grep ^{name}", file=sys.stderr)
    return 1 if risen else 0


def count(source: Path) -> dict[str, list[str]]:
    """Places in the tree under ``source``, by what is counted."""
    places: dict[str, list[str]] = {name: [] for name in (
        "vague_names", "docstrings_without_subject", "short_docstrings", "reused_file_names", "reused_class_names",
        "long_files", "long_functions", "functions_of_many_arguments", "public_names_without_docstring",
    )}  # fmt: skip
    file_names, class_names = defaultdict(list), defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        text, shown = path.read_text(), str(path.relative_to(ROOT))
        tree = ast.parse(text)
        if path.name != "__init__.py":
            file_names[path.name].append(shown)
        if (num_lines := text.count("\n")) > MAX_FILE_LINES:
            places["long_files"].append(f"{shown} ({num_lines})")
        for name, line in _places_in(tree):
            places[name].append(f"{shown}:{line}")
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                class_names[node.name].append(f"{shown}:{node.lineno}")
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                places["public_names_without_docstring"].append(f"{shown}:{node.lineno} {node.name}")
    for kind, names in (("reused_file_names", file_names), ("reused_class_names", class_names)):
        places[kind] = [f"{name}: {', '.join(homes)}" for name, homes in names.items() if len(homes) > 1]
    return places


def _places_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
            yield "vague_names", f"{node.lineno} {node.id}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring, line = ast.get_docstring(node) or "", getattr(node, "lineno", 1)
            if NO_SUBJECT.match(docstring):
                yield "docstrings_without_subject", f"{line} {docstring.splitlines()[0]}"
            if docstring and len(docstring.split()) < MIN_DOCSTRING_WORDS:
                yield "short_docstrings", f"{line} {docstring}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield "long_functions", f"{node.lineno} {node.name} ({size})"
            arguments = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            if arguments > MAX_ARGUMENTS:
                yield "functions_of_many_arguments", f"{node.lineno} {node.name} ({arguments})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
