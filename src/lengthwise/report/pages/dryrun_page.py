"""The page of a dry run: memory over time by kind for every rank that was run, and its counts beside predictions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.core.wording import GIB
from lengthwise.report.charts.lines import LineStyle, Series, line_chart
from lengthwise.report.pages.run_figures import Figure
from lengthwise.report.pages.templates import render
from lengthwise.report.units import count, memory

Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]
"""Heading, columns, rows of text."""


def render_dry_run(document: Mapping[str, Any]) -> str:
    """The page of what ``lengthwise dryrun --json`` prints; all text is escaped."""
    differences = document["differences"]
    return render(
        "dryrun.html.j2",
        title=f"{document['model']} on {document['cluster']}",
        headline=f"policy {document['policy']} · collectives "
        + ("as proven, in one order on all of these ranks" if not differences else f"differ: {'; '.join(differences)}"),
        ranks=[(_memory(row, document["memory_bytes"]), _tables(row)) for row in document["ranks"]],
    )


def _memory(row: Mapping[str, Any], device_bytes: int) -> Figure:
    kinds = list(row["peak_bytes"])
    totals = tuple((float(k), sum(sample[1:]) / GIB) for k, sample in enumerate(row["memory"]))
    series = [
        Series(name=kind, points=tuple((float(k), sample[1 + n] / GIB) for k, sample in enumerate(row["memory"])))
        for n, kind in enumerate(kinds)
    ]
    style = LineStyle(
        x_title="allocations, in the order of the step", y_title="GiB", zero=True,
        limit=(device_bytes / GIB, f"memory of a device, {memory(device_bytes)}"),
        moments={float(k): sample[0] for k, sample in enumerate(row["memory"])},
    )  # fmt: skip
    return Figure(
        title=f"Rank {row['rank']:,}",
        caption=f"Memory by kind over the step. The peak, {memory(row['peak_total_bytes'])}, is in {row['peak_at']}.",
        chart=line_chart(
            [Series(name="all", points=totals), *series], label=f"Memory of rank {row['rank']}", style=style
        ),
        missing="This rank allocates nothing.",
    )


def counted_and_predicted(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Bytes at the peak of a rank and its FLOPs, by kind, each as counted and as predicted."""
    predicted = row["predicted"]
    expected = {**(predicted["peak_bytes"] or {}), "peak": predicted["peak_total_bytes"]}
    sizes = {**row["peak_bytes"], "peak": row["peak_total_bytes"]}
    return [
        *(
            (kind, memory(size), "-" if expected.get(kind) is None else memory(expected[kind]))
            for kind, size in sizes.items()
        ),
        *(
            (f"FLOPs, {kind}", count(row["flops"].get(kind, 0)), count(number))
            for kind, number in predicted["flops"].items()
        ),
    ]


def _tables(row: Mapping[str, Any]) -> tuple[Table, ...]:
    calls: Counter[tuple[str, str, int]] = Counter()
    moved: Counter[tuple[str, str, int]] = Counter()
    for collective in row["collectives"]:
        key = (collective["operation"] or "between passes", collective["kind"], len(collective["ranks"]))
        calls[key] += 1
        moved[key] += collective["sent_bytes"]
    return (
        ("Counted and predicted", ("", "counted", "predicted"), counted_and_predicted(row)),
        (
            "Collectives", ("in", "kind", "ranks", "calls", "sent"),
            [(*key[:2], count(key[2]), count(number), memory(moved[key])) for key, number in calls.items()],
        ),
        ("Kernels", ("kernel", "launches"), [(name, count(number)) for name, number in row["kernels"].items()]),
        (
            "The host waits for the device", ("line", "reason", "times"),
            [(wait["line"], wait["reason"], count(wait["count"])) for wait in row["synchronisations"]],
        ),
    )  # fmt: skip
