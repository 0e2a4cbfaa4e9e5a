"""What `lengthwise compare` prints: a table a cluster, and how far it is."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.specs import ClusterSpec
from lengthwise.core.wording import counted
from lengthwise.data.max_length import LengthLedger
from lengthwise.report.pages.compare_results import ClusterResult, Comparison, columns, headline, outlook, row
from lengthwise.report.pages.sweep_results import slower_with_more, sweep_columns, sweep_rows
from lengthwise.session.compare_lengths import compare_points, ledger_words, write_page
from lengthwise.session.compare_policies import PolicyComparison
from lengthwise.session.console import emit_json, progress, stdout
from lengthwise.session.sweep import SweepPoint

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = ("policy", "tokens/s", "per device", "over static", "MFU", "step time", "idle", "gap", "peak")
SHOWN_WITH_BUDGET = ("policy", "tokens/s", "per device", "over static", "MFU", "gap", "peak", "hours", "cost")
SHORT = {"per device": "/GPU", "over static": "static", "step time": "step", "tokens/step": "tok/step"}
"""Headings that are shorter on a terminal of eighty columns."""


def compare_with_progress(
    contest: PolicyComparison, points: Sequence[SweepPoint], *, with_steps: bool
) -> list[ClusterResult]:
    """Results of every point, as of ``compare_points``; meanwhile a bar shows which policy plans, and how far it is."""
    with progress() as bar:
        task = bar.add_task("plan", total=len(points) * len(contest.policies) * contest.num_steps)

        def show(cluster: ClusterSpec, policy: str, num_done: int) -> None:
            bar.update(task, advance=num_done, description=f"{counted(cluster.num_devices, 'device')}, {policy}")

        return compare_points(contest, points, with_steps=with_steps, on_step=show)


def show_comparison(comparison: Comparison, ledger: LengthLedger, html: Path | None, *, json: bool) -> None:
    """Write the page, if there is to be one, and print tables or one document."""
    if html is not None:
        write_page(comparison, html)
    emit_json(comparison.to_json()) if json else print_comparison(comparison, ledger, html)


def print_comparison(comparison: Comparison, ledger: LengthLedger, html: Path | None) -> None:
    """Print a table and the result in a sentence for each cluster, one table of all sizes, and where the page is."""
    console = stdout()
    is_sweep = len({(result.token_budget, result.network_gbit_per_s) for result in comparison.clusters}) > 1
    by_gpus = len({result.num_devices for result in comparison.clusters}) == len(comparison.clusters)
    if by_gpus or not is_sweep:
        for result in comparison.clusters:
            _print_cluster(result, ledger)
    if len(comparison.clusters) > 1:
        names = sweep_columns(comparison.clusters)
        console.print(table_of(names, sweep_rows(comparison.clusters, names)))
        for sentence in slower_with_more(comparison.clusters):
            console.print(sentence, soft_wrap=True)
    if is_sweep and not by_gpus:
        for why in dict.fromkeys(why for result in comparison.clusters for why in result.refusals):
            console.print(f"refused: {why}", soft_wrap=True)
    model = "costs fitted to measured micro-batches" if comparison.settings.get("profile") else "an analytic cost model"
    console.print(f"simulated on {model}, not measured; each gap is to one bound for all policies", soft_wrap=True)
    if jitter := comparison.settings.get("jitter"):
        console.print(
            f"simulated with jitter {jitter:g}: times have its noise, and every policy its own; gaps are of the plans, "
            "without it",
            soft_wrap=True,
        )
    console.print(dict(comparison.facts)["Costs"], soft_wrap=True)
    if unpriced := comparison.settings.get("not_priced"):
        console.print(f"not priced in {comparison.model}: {unpriced}", soft_wrap=True)
    if html is not None:
        console.print(f"page: {html}", soft_wrap=True)


def _print_cluster(result: ClusterResult, ledger: LengthLedger) -> None:
    """Policies that can run, the fastest first, and why others cannot."""
    console = stdout()
    console.print(
        f"{result.cluster}, {result.tokens_per_step:,} tokens a step on average, {ledger_words(ledger)}", soft_wrap=True
    )
    if result.ranked:
        wanted = SHOWN if result.hours(result.ranked[0]) is None else SHOWN_WITH_BUDGET
        names = [name for name in wanted if name in columns(result)]
        console.print(table_of(names, [row(result, policy, names) for policy in result.ranked]))
        console.print(headline(result), soft_wrap=True)
        console.print(outlook(result), soft_wrap=True)
    for why, policies in result.refusals.items():
        console.print(f"{', '.join(policies)}: refused: {why}", soft_wrap=True)
    console.print()


def table_of(names: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """Rows under headings, words to the left and numbers to the right."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        shown.add_column(SHORT.get(name, name), justify="left" if name == "policy" else "right")
    for cells in rows:
        shown.add_row(*cells)
    return shown
