"""The figures of a comparison, each with the sentence that says what to see."""

from collections.abc import Sequence
from dataclasses import replace
from math import log2

from lengthwise.report.charts.histogram import length_histogram
from lengthwise.report.charts.lanes import MOST_ROWS, num_lanes, step_chart
from lengthwise.report.charts.lines import NUM_COLOURS, LineStyle, Series, line_chart
from lengthwise.report.charts.stacked import Bar, stacked_bars
from lengthwise.report.charts.svg import Chart
from lengthwise.report.pages.compare_results import (
    PARTS,
    YARDSTICK,
    ClusterResult,
    Comparison,
    fastest_first,
)
from lengthwise.report.pages.run_figures import Figure
from lengthwise.report.units import compact, count, ratio, seconds, share, tokens

TIME_SCALE = 3.0
"""A policy slower than the fastest by more than this factor gets a time axis of its own."""


def speed_figure(cluster: ClusterResult) -> Figure:
    """Tokens per second by policy, the fastest first."""
    ranked = cluster.ranked
    words = [
        count(result.tokens_per_s) + (f"  ({ratio(over)})" if (over := cluster.over_static(result)) else "")
        for result in ranked
    ]
    bars = [
        Bar(name=result.policy, parts=(("s0" if k == 0 else "s5", "", result.tokens_per_s),), words=said, strong=k == 0)
        for k, (result, said) in enumerate(zip(ranked, words))
    ]
    return Figure(
        title="Tokens per second",
        caption=f"Trained tokens, padding left out; in brackets, times those of {YARDSTICK}."
        if cluster.over_static(ranked[0])
        else "Trained tokens, padding left out.",
        chart=Chart(
            svg=stacked_bars(bars, label="Tokens per second of each policy"),
            columns=("policy", "tokens/s", f"over {YARDSTICK}"),
            rows=tuple(
                (result.policy, count(result.tokens_per_s), ratio(cluster.over_static(result))) for result in ranked
            ),
        ),
    )


def time_figure(cluster: ClusterResult) -> Figure:
    """What each policy spends device time on, for the same tokens: shorter is better."""
    ranked = cluster.ranked
    per_token_s = {result.policy: cluster.num_devices / result.tokens_per_s for result in ranked}
    spent = {result.policy: _scaled(result.spent_s, per_token_s[result.policy] * 1e6) for result in ranked}
    used = [part for part in PARTS if any(parts[part] > 0 for parts in spent.values())]
    bars = [
        Bar(
            name=result.policy,
            parts=tuple(
                (f"p-{part}", f"{PARTS[part]}: {seconds(spent[result.policy][part])}", spent[result.policy][part])
                for part in used
            ),
            words=f"{per_token_s[result.policy] * 1e6:,.0f} device-s",
            strong=k == 0,
        )
        for k, result in enumerate(ranked)
    ]
    return Figure(
        title="Where the time goes",
        caption="Device-seconds that a million trained tokens take: the shorter the bar, the better.",
        chart=Chart(
            svg=stacked_bars(bars, label="Device-seconds per million tokens of each policy, by what they are spent on"),
            legend=tuple((f"p-{part}", PARTS[part]) for part in used),
            columns=("policy", *(PARTS[part] for part in used)),
            rows=tuple(
                (
                    result.policy,
                    *(share(spent[result.policy][part] / sum(spent[result.policy].values())) for part in used),
                )
                for result in ranked
            ),
        ),
        missing="No time was spent.",
    )


def _scaled(spent_s: dict[str, float], total: float) -> dict[str, float]:
    """Scale the shares to another total; every part is named."""
    total_spent_s = sum(spent_s.values())
    return {part: spent_s.get(part, 0.0) / total_spent_s * total if total_spent_s else 0.0 for part in PARTS}


def step_figures(cluster: ClusterResult) -> list[Figure]:
    """Timelines of the same typical step under every policy."""
    fastest_s = min((step.timeline.step_time_s for step in cluster.steps.values()), default=0.0)
    figures = []
    for result in cluster.ranked:
        if (step := cluster.steps.get(result.policy)) is None:
            continue
        own_s = step.timeline.step_time_s
        end_s = own_s if own_s > TIME_SCALE * fastest_s else _common_end_s(cluster, fastest_s)
        sentences = [f"{step.plan.strategy_words}.", f"{seconds(own_s)}, {share(step.timeline.idle_fraction)} idle."]
        if end_s == own_s and own_s > TIME_SCALE * fastest_s:
            sentences.append("This chart has a time axis of its own.")
        if (lanes := num_lanes(step.plan)) > MOST_ROWS:
            sentences.append(
                f"Shown are some of the {lanes:,} pipeline stages: whole pipelines, busy ones and idle ones."
            )
        figures.append(
            Figure(
                title=result.policy,
                caption=" ".join(sentences),
                chart=step_chart(
                    step.plan, step.timeline, end_s=end_s, label=f"Timeline of one step under {result.policy}"
                ),
            )
        )
    return figures


def _common_end_s(cluster: ClusterResult, fastest_s: float) -> float:
    times_s = [step.timeline.step_time_s for step in cluster.steps.values()]
    return max(time_s for time_s in times_s if time_s <= TIME_SCALE * fastest_s)


def scaling_figure(clusters: Sequence[ClusterResult]) -> Figure:
    """Tokens per second and device over cluster sizes: level where a policy scales perfectly."""
    names = fastest_first(clusters)
    drawn_names = _drawn(names)
    speeds = {
        (result.policy, cluster.num_devices): result.tokens_per_s / cluster.num_devices
        for cluster in clusters
        for result in cluster.ranked
    }
    sizes = sorted(cluster.num_devices for cluster in clusters)
    series = [
        Series(name=name, points=tuple((log2(n), speeds[name, n]) for n in sizes if (name, n) in speeds))
        for name in drawn_names
    ]
    style_of = LineStyle(
        x_title="devices; tokens per step grow with them", y_title="tokens per second and device", zero=True,
        x_labels=_powers, y_labels=lambda ticks: tuple(map(compact, ticks)),
    )  # fmt: skip
    chart = line_chart(series, label="Tokens per second and device over the number of devices", style=style_of)
    left_out = [name for name in names if name not in drawn_names]
    return Figure(
        title="Scaling",
        caption="A level line is perfect scaling."
        + (f" Not drawn, but among the numbers: {', '.join(left_out)}." if left_out else ""),
        chart=chart
        and replace(
            chart,
            columns=("devices", *names),
            rows=tuple(
                (count(n), *(count(speeds[name, n]) if (name, n) in speeds else "refused" for name in names))
                for n in sizes
            ),
        ),
        missing="No policy can run on two of the clusters.",
    )


def _drawn(names: Sequence[str]) -> list[str]:
    """Choose as many policies as there are colours: the fastest, and the two common baselines."""
    baselines = [name for name in (YARDSTICK, "padded") if name in names]
    others = [name for name in names if name not in baselines]
    drawn = {*others[: NUM_COLOURS - len(baselines)], *baselines}
    return [name for name in names if name in drawn]


def _powers(ticks: Sequence[float]) -> tuple[str, ...]:
    return tuple(count(2.0**tick) for tick in ticks)


def length_figure(comparison: Comparison) -> Figure:
    """How long the sequences are."""
    bins = comparison.length_bins
    caption = ""
    long = [length_bin for length_bin in bins if length_bin.low >= 8192]
    if long and (num_tokens := sum(length_bin.num_tokens for length_bin in bins)):
        sequences = sum(length_bin.num_sequences for length_bin in long) / sum(
            length_bin.num_sequences for length_bin in bins
        )
        caption = (
            f"Sequences of {tokens(long[0].low)} tokens and more are {share(sequences)} of the sequences "
            f"and hold {share(sum(length_bin.num_tokens for length_bin in long) / num_tokens)} of the tokens."
        )
    return Figure(
        title="Sequence lengths",
        caption=caption,
        chart=length_histogram(bins, label="Lengths of the sequences, share of sequences and of tokens"),
        missing="The lengths are not known.",
    )
