"""The page of a comparison: one HTML file that needs no network, and no script to be read."""

from typing import Any

from lengthwise.core.wording import counted
from lengthwise.report.pages.compare_figures import (
    length_figure,
    scaling_figure,
    speed_figure,
    step_figures,
    time_figure,
)
from lengthwise.report.pages.compare_results import (
    ClusterResult,
    Comparison,
    certificate,
    columns,
    headline,
    row,
    tiles,
)
from lengthwise.report.pages.sweep_results import slower_with_more, sweep_page
from lengthwise.report.pages.templates import render
from lengthwise.report.units import count


def render_comparison(comparison: Comparison) -> str:
    """The page; all text is escaped.

    Args:
        comparison: at least one policy of its first cluster can run.
    """
    clusters = [cluster for cluster in comparison.clusters if cluster.ranked]
    assert clusters, "a page needs a policy that can run"
    many = len(comparison.clusters) > 1
    sizes = [cluster.num_devices for cluster in clusters]
    headlines = [headline(cluster) for cluster in clusters] if len({*sizes}) == len(sizes) else []
    return render("policies.html.j2", 
        title=f"{comparison.model} on {', '.join(map(str, dict.fromkeys(sizes)))} {comparison.device}",
        headlines=[*headlines, *slower_with_more(clusters)],
        certificate="" if many else certificate(clusters[0]),
        comparison=comparison,
        scaling=scaling_figure(comparison.clusters) if len({*sizes}) == len(clusters) > 1 else None,
        sweep=sweep_page(comparison.clusters) if many else None,
        clusters=[_section(cluster, many) for cluster in comparison.clusters],
        lengths=length_figure(comparison),
        styles=("report.css", "policies.css"),
    )  # fmt: skip


def _section(cluster: ClusterResult, many: bool) -> dict[str, Any]:
    if not cluster.ranked:
        return {"title": _title(cluster), "refused": _refusals(cluster), "tiles": []}
    return {
        "title": _title(cluster) if many else "",
        "sentence": certificate(cluster) if many else "",
        "tiles": tiles(cluster),
        "columns": columns(cluster),
        "rows": [row(cluster, result, columns(cluster)) for result in cluster.ranked],
        "refused": _refusals(cluster),
        "figures": [speed_figure(cluster), time_figure(cluster)],
        "steps": step_figures(cluster),
    }


def _title(cluster: ClusterResult) -> str:
    network = f", {cluster.network_gbit_per_s:g} Gbit/s per device" if cluster.network_gbit_per_s else ""
    return f"{counted(cluster.num_devices, 'device')}, {count(cluster.tokens_per_step)} tokens a step{network}"


def _refusals(cluster: ClusterResult) -> list[tuple[str, str]]:
    return [(", ".join(names), why) for why, names in cluster.refusals.items()]
