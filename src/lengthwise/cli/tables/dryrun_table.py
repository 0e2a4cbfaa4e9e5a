"""What `lengthwise dryrun` prints: bytes and FLOPs beside predictions, kernels, collectives, synchronisations."""

from collections import Counter
from typing import Any

from lengthwise.core.wording import bytes_in_words
from lengthwise.session.console import stdout

SHOWN_KERNELS = 12
KERNELS = "kernels"
"""The stream on which everything is computed."""
AS_PLANNED = ("those of the proven plan", "among the ranks of the plan")
"""What is known of collectives of this library's own models, and of those that transformers computes."""


def print_dry_run(document: dict[str, Any]) -> None:
    """Print every rank that was run, and what differs from the plan."""
    console = stdout()
    model, cluster, policy = (document[name] for name in ("model", "cluster", "policy"))
    weights = f", weights {document['weights']}" if "weights" in document else ""
    console.print(
        f"{model} on {cluster}, policy {policy}{weights}: one step on fake tensors; nothing was measured",
        soft_wrap=True,
    )
    for row in document["ranks"]:
        _print_rank(row)
    if not_predicted := document.get("not_predicted"):
        console.print(f"\nnot predicted: {not_predicted}", soft_wrap=True)
    for difference in document["differences"]:
        console.print(f"not as planned: {difference}", soft_wrap=True)
    if not document["differences"]:
        console.print(
            f"\ncollectives: {AS_PLANNED['weights' in document]}, in the same order on all of these ranks",
            soft_wrap=True,
        )


def _print_rank(row: dict[str, Any]) -> None:
    from rich.table import Table

    from lengthwise.report.pages.dryrun_page import counted_and_predicted

    console = stdout()
    console.print(f"\nrank {row['rank']:,} (run in {row['time_s']:.1f} s), peak in {row['peak_at']}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "counted", "predicted"):
        table.add_column(heading, justify="right" if heading else "left")
    for cells in counted_and_predicted(row):
        table.add_row(*cells)
    console.print(table)
    kernels = list(row["kernels"].items())
    named = ", ".join(f"{name} {number:,}" for name, number in kernels[:SHOWN_KERNELS])
    console.print(f"kernels: {sum(row['kernels'].values()):,} launches; {named}", soft_wrap=True)
    calls: Counter[str] = Counter(f"{c['kind']} of {len(c['ranks'])}" for c in row["collectives"])
    console.print("collectives: " + ", ".join(f"{number:,} {name}" for name, number in calls.items()), soft_wrap=True)
    if saved := row.get("checkpoint"):
        console.print(
            f"of a checkpoint it writes {bytes_in_words(saved['bytes'])} in {saved['tensors']:,} tensors",
            soft_wrap=True,
        )
    for copy in row["host_copies"]:
        console.print(
            f"copies {copy['direction']} that the host does not wait for: {bytes_in_words(copy['bytes'])} on stream "
            f"{copy['stream']}",
            soft_wrap=True,
        )
    for wait in row["synchronisations"]:
        console.print(f"the host waits {wait['count']:,} times: {wait['line']}, {wait['reason']}", soft_wrap=True)
    for stream in row["streams"]:
        waits = ", ".join(f"{name} {number:,} times" for name, number in stream["waits_for"].items()) or "nothing"
        done = ", ".join(f"{number:,} {kind}" for kind, number in stream["operations"].items())
        of_kernels = f"{KERNELS} wait for {waits}"
        text = of_kernels if stream["stream"] == KERNELS else f"{stream['stream']}: {done}; waits for {waits}"
        console.print(text, soft_wrap=True)
    for race in row["races"]:
        console.print(f"race, {race['count']:,} times: {race['race']}", soft_wrap=True)
