"""What `lengthwise compare` prints: a table a cluster, and how far it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.specs import ClusterSpec
from lengthwise.data.max_length import LengthLedger
from lengthwise.report.pages.compare_results import ClusterResult, Comparison, headline, row
from lengthwise.session.compare_lengths import OnClusterStep, ledger_words
from lengthwise.session.console import progress, stdout

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("policy", "tokens/s", "static", "step", "idle", "bubble", "padding", "gap", "peak", "plan")


@contextmanager
def planning_progress(num_steps: int) -> Iterator[OnClusterStep]:
    """Show how many of the steps are planned, and which policy is at work."""
    with progress() as bar:
        task = bar.add_task("plan", total=num_steps)

        def show(cluster: ClusterSpec, policy: str, num_done: int) -> None:
            bar.update(task, advance=num_done, description=f"{cluster.num_devices} devices, {policy}")

        yield show


def print_comparison(comparison: Comparison, ledger: LengthLedger, html: Path | None) -> None:
    """Print a table and the result in a sentence for each cluster, and where the page is."""
    console = stdout()
    for result in comparison.clusters:
        console.print(
            f"{result.cluster}, {result.tokens_per_step:,} tokens a step on average, {ledger_words(ledger)}",
            soft_wrap=True,
        )
        if result.ranked:
            console.print(_table(result))
            console.print(headline(result), soft_wrap=True)
        for why, names in result.refusals.items():
            console.print(f"{', '.join(names)}: refused: {why}", soft_wrap=True)
        console.print()
    console.print("simulated on an analytic cost model, not measured")
    if unpriced := comparison.settings.get("not_priced"):
        console.print(f"not priced in {comparison.model}: {unpriced}", soft_wrap=True)
    if html is not None:
        console.print(f"page: {html}", soft_wrap=True)


def _table(result: ClusterResult) -> "Table":
    """Policies that can run, the fastest first, in eighty columns."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for policy in result.ranked:
        shown.add_row(*row(result, policy))
    return shown
