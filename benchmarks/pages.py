"""Pages of results: tables, and goals met or missed, written as Markdown and JSON with commit, machine and date."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import RESULTS, machine

FOLDER = Path(__file__).parent
Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What was promised and what came out."""

    what: str
    aim: str
    measured: str
    met: bool | None
    """None: nothing was measured."""

    @property
    def verdict(self) -> str:
        """In a word."""
        return "not measured" if self.met is None else "met" if self.met else "**missed**"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table with what has to be known to read it."""

    title: str
    text: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    goals: tuple[Goal, ...] = ()
    after: str = ""
    """What the table shows."""
    measured: tuple[str, ...] = ()
    """Columns of ``head`` with numbers of this machine, which no other run has to give again; empty: none."""


def at_most(what: str, value: float | None, limit: float, unit: str) -> Goal:
    """A goal for a value that should be small."""
    met = None if value is None else value <= limit
    measured = "-" if value is None else number(value, unit)
    return Goal(what=what, aim=f"at most {number(limit, unit)}", measured=measured, met=met)


def at_least(what: str, value: float | None, limit: float, unit: str) -> Goal:
    """A goal for a value that should be large."""
    met = None if value is None else value >= limit
    measured = "-" if value is None else number(value, unit)
    return Goal(what=what, aim=f"at least {number(limit, unit)}", measured=measured, met=met)


def number(value: float, unit: str) -> str:
    """A value with its unit: ``ms`` and ``s`` from seconds, ``%`` from a share, ``x`` from a ratio."""
    if unit == "ms":
        return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.3g} s"
    if unit == "%":
        return f"{value * 100:.3f} %" if 0 < abs(value) < 5e-4 else f"{value * 100:.2f} %"
    return f"{value:,.3f}x" if unit == "x" else f"{value:,.3g} {unit}".strip()


def write(name: str, *, title: str, first: str, sections: Sequence[Section]) -> None:
    """``NAME.md`` beside the scripts and ``results/NAME.json``.

    Args:
        name: of both files.
        title: of the page.
        first: what the numbers are, in a sentence or two.
        sections: in order.
    """
    where = provenance()
    goals = [goal for section in sections for goal in section.goals]
    lines = [f"# {title}", "", first, "", _where(where), ""]
    if goals:
        lines += ["## Goals", "", *markdown_table(("goal", "aim", "measured", ""), [_row(goal) for goal in goals]), ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        lines += [*markdown_table(section.head, section.rows), ""] if section.rows else []
        lines += [section.after, ""] if section.after else []
    (FOLDER / f"{name}.md").write_text("\n".join(lines).rstrip() + "\n")
    RESULTS.mkdir(exist_ok=True)
    document = {
        **where,
        "goals": [{"goal": g.what, "aim": g.aim, "measured": g.measured, "met": g.met} for g in goals],
        "tables": [{"title": s.title, "head": s.head, "rows": s.rows} for s in sections],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def rewrite(name: str, sections: Sequence[Section]) -> None:
    """Replace these sections of ``NAME.md`` and ``results/NAME.json``, and their goals; each says how it was made.

    Args:
        name: of both files, which ``write`` has made.
        sections: new ones come last.
    """
    page, results = FOLDER / f"{name}.md", RESULTS / f"{name}.json"
    head, *blocks = page.read_text().split("\n## ")
    by_title = {block.partition("\n")[0]: block.rstrip() for block in blocks}
    document = json.loads(results.read_text())
    goals = {goal["goal"]: goal for goal in document["goals"]}
    tables = {table["title"]: table for table in document["tables"]}
    for section in sections:
        where = _where(provenance())
        parts = [section.title, "", section.text, "", where, "", *markdown_table(section.head, section.rows)]
        by_title[section.title] = "\n".join([*parts, *(["", section.after] if section.after else [])])
        tables[section.title] = {"title": section.title, "head": section.head, "rows": section.rows}
        for g in section.goals:
            goals[g.what] = {"goal": g.what, "aim": g.aim, "measured": g.measured, "met": g.met}
    document |= {"goals": list(goals.values()), "tables": list(tables.values())}
    shown = [
        _row(Goal(what=g["goal"], **{name: g[name] for name in ("aim", "measured", "met")})) for g in goals.values()
    ]
    by_title["Goals"] = "\n".join(["Goals", "", *markdown_table(("goal", "aim", "measured", ""), shown)])
    page.write_text("\n\n## ".join([head.rstrip(), *by_title.values()]) + "\n")
    results.write_text(json.dumps(document, indent=1) + "\n")


def stale_rows(name: str, sections: Sequence[Section]) -> list[str]:
    """Rows of these sections that ``results/NAME.json`` has otherwise or not at all, each in a line."""
    tables = {table["title"]: table for table in json.loads((RESULTS / f"{name}.json").read_text())["tables"]}
    stale = []
    for section in sections:
        there = tables.get(section.title, {"head": [], "rows": []})
        kept = [place for place, column in enumerate(section.head) if column not in section.measured]
        now, then = (
            [[str(row[place]) for place in kept if place < len(row)] for row in rows]
            for rows in (section.rows, there["rows"])
        )
        for number in range(max(len(now), len(then))):
            pair = [rows[number] if number < len(rows) else ["no such row"] for rows in (then, now)]
            if pair[0] != pair[1]:
                shown, given = (" | ".join(row) for row in pair)
                stale.append(f"{name}.md, {section.title}: the page has {shown}; the code gives {given}")
    return stale


def check(name: str, sections: Sequence[Section]) -> None:
    """Exit with 1 and the rows that differ if the page no longer says what the code gives."""
    if stale := stale_rows(name, sections):
        sys.exit("\n".join([*stale, f"{len(stale)} rows are stale; write the page again with: make pages"]))


def provenance() -> dict[str, Any]:
    """Commit, machine, date and command of this run."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = " with uncommitted changes" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py") else ""
    return {
        "commit": commit + changed,
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_argument, sys.argv[1:])]),
    }


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Lines of a table."""
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join('' if cell is None else str(cell).replace('|', '/') for cell in row)} |" for row in rows),
    ]


def say(section: Section) -> Section:
    """Print a section as soon as it is there; returns it."""
    lines = ["", section.title, "-" * len(section.title), *markdown_table(section.head, section.rows)]
    lines += [f"  {goal.verdict}: {goal.what}: {goal.measured} (aim: {goal.aim})" for goal in section.goals]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return section


def on_one_core() -> None:
    """Start this program again, bound to one core and to one thread of the linear algebra, unless it is already."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **threads})


def _row(goal: Goal) -> tuple[str, ...]:
    return goal.what, goal.aim, goal.measured, goal.verdict


def _where(where: dict[str, Any]) -> str:
    return f"`{where['command']}` at commit {where['commit']}, on {where['machine']}, {where['date']}."


def _argument(word: str) -> str:
    """Without the names of this machine's folders."""
    return "DIR" if Path(word).is_dir() else word


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=FOLDER.parent)
    return ran.stdout.strip()
