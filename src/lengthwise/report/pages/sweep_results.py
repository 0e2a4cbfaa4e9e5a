"""Comparisons at several sizes of cluster, step and network, as one table and one curve."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.report.charts.lines import Series
from lengthwise.report.charts.sweep_chart import sweep_chart
from lengthwise.report.pages.compare_results import CELLS, YARDSTICK, ClusterResult, fastest_first
from lengthwise.report.pages.run_figures import Figure
from lengthwise.report.units import count, token_count

AXES = {
    "tokens/step": "tokens per step",
    "Gbit/s": "network, Gbit/s per device",
    "GPUs": "devices",
}
"""Sizes that a sweep may vary -> in words; the first that varies is the horizontal axis of the curve."""
_BEST = ("policy", "tokens/s", "per device", "MFU", "over static", "hours", "cost")


@dataclass(frozen=True)
class SweepPage:
    """The part of the page about all sizes together."""

    figure: Figure | None
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sizes_of(cluster: ClusterResult) -> dict[str, float]:
    """The sizes of one comparison, by the names of ``AXES``."""
    return {
        "tokens/step": cluster.token_budget or cluster.tokens_per_step,
        "Gbit/s": cluster.network_gbit_per_s,
        "GPUs": cluster.num_devices,
    }


def sweep_columns(clusters: Sequence[ClusterResult]) -> tuple[str, ...]:
    """Sizes that vary, and what is known of the fastest policy."""
    varying = [name for name in reversed(AXES) if len({sizes_of(cluster)[name] for cluster in clusters}) > 1]
    best = next((cluster for cluster in clusters if cluster.ranked), None)
    columns = [
        name for name in _BEST
        if best is not None and not (
            (name in ("hours", "cost") and getattr(best, name)(best.ranked[0]) is None)
            or (name == "over static" and best.over_static(best.ranked[0]) is None)
        )
    ]  # fmt: skip
    return (*varying, *columns)


def sweep_rows(clusters: Sequence[ClusterResult], columns: Sequence[str]) -> list[tuple[str, ...]]:
    """A row a comparison: its sizes, and the fastest policy under the other columns."""
    rows = []
    for cluster in clusters:
        sizes = tuple(_size_words(name, cluster) for name in columns if name in AXES)
        names = columns[len(sizes) :]
        best = tuple(CELLS[name](cluster, cluster.ranked[0]) for name in names) if cluster.ranked else ("none",)
        rows.append((*sizes, *best))
    return rows


def _size_words(name: str, cluster: ClusterResult) -> str:
    size = sizes_of(cluster)[name]
    return token_count(size) if name == "tokens/step" else f"{size:,g}"


def slower_with_more(clusters: Sequence[ClusterResult]) -> list[str]:
    """A sentence for each cluster that trains fewer tokens per second than one of fewer devices with the same links.

    Their steps are of as many tokens, unless they grow with the cluster.
    """
    clusters = [cluster for cluster in clusters if cluster.ranked]
    points = {(cluster.num_devices, _links(cluster)) for cluster in clusters}
    does_grow = len(points) == len(clusters)
    sentences = []
    for cluster in clusters:
        speed = cluster.ranked[0].tokens_per_s
        fewer = [
            other for other in clusters
            if other.num_devices < cluster.num_devices and _links(other) == _links(cluster)
            and (does_grow or other.token_budget == cluster.token_budget)
        ]  # fmt: skip
        best = max(fewer, key=lambda other: other.ranked[0].tokens_per_s, default=None)
        if best is not None and best.ranked[0].tokens_per_s > speed:
            links = set(map(_links, clusters))
            others = "" if len(links) == 1 else f" at {cluster.network_gbit_per_s:g} Gbit/s"
            sentences.append(
                f"{cluster.num_devices:,} devices are slower than {best.num_devices:,}{others}: {count(speed)} tokens "
                f"per second against {count(best.ranked[0].tokens_per_s)}."
            )
    return sentences


def _links(cluster: ClusterResult) -> tuple[float, float]:
    return cluster.network_gbit_per_s, cluster.link_gbyte_per_s


def sweep_figure(clusters: Sequence[ClusterResult]) -> Figure | None:
    """The speed of `auto`, or of the fastest policy, over that of `static` as a curve; None where there is none."""
    policy = "auto" if "auto" in fastest_first(clusters) else ""
    axis, by_line = _lines(clusters)
    series = []
    for name, members in by_line.items():
        points = []
        for cluster in members:
            result = next((result for result in cluster.ranked if policy in (result.policy, "")), None)
            if result and (over := cluster.over_static(result)):
                points.append((sizes_of(cluster)[axis], over))
        if points:
            series.append(Series(name=name or policy or "fastest", points=tuple(sorted(points))))
    words = f"Speed of {policy or 'the fastest policy'} over {YARDSTICK}"
    title = f"{policy or 'fastest'} over {YARDSTICK}"
    size = token_count if axis == "tokens/step" else "{:,g}".format
    chart = sweep_chart(series, label=words, x_title=AXES[axis], y_title=title, size=size)
    if chart is None:
        return None
    return Figure(title=words, caption="At 1 both train as many tokens per second.", chart=chart)


def _lines(clusters: Sequence[ClusterResult]) -> tuple[str, dict[str, list[ClusterResult]]]:
    """The size along the horizontal axis, and the comparisons of each line: the other sizes are the same along it."""
    varying = [name for name in AXES if len({sizes_of(cluster)[name] for cluster in clusters}) > 1]
    for axis in varying:
        lines: dict[str, list[ClusterResult]] = {}
        for cluster in clusters:
            name = ", ".join(f"{_size_words(other, cluster)} {other}" for other in reversed(varying) if other != axis)
            lines.setdefault(name, []).append(cluster)
        if max(map(len, lines.values())) > 1:
            return axis, lines
    return "GPUs", {"": list(clusters)}  # such as steps that grow with the cluster


def sweep_page(clusters: Sequence[ClusterResult]) -> SweepPage:
    """The curve and the table."""
    columns = sweep_columns(clusters)
    return SweepPage(sweep_figure(clusters), columns, sweep_rows(clusters, columns))
