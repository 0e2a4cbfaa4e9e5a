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
        count(one.tokens_per_s) + (f"  ({ratio(over)})" if (over := cluster.over_static(one)) else "") for one in ranked
    ]
    bars = [
        Bar(name=one.policy, parts=(("s0" if k == 0 else "s5", "", one.tokens_per_s),), words=said, strong=k == 0)
        for k, (one, said) in enumerate(zip(ranked, words))
    ]
    return Figure(
        title="Tokens per second",
        caption=f"Trained tokens, padding left out; in brackets, times those of {YARDSTICK}."
        if cluster.over_static(ranked[0])
        else "Trained tokens, padding left out.",
        chart=Chart(
            svg=stacked_bars(bars, label="Tokens per second of each policy"),
            columns=("policy", "tokens/s", f"over {YARDSTICK}"),
            rows=tuple((one.policy, count(one.tokens_per_s), ratio(cluster.over_static(one))) for one in ranked),
        ),
    )


def time_figure(cluster: ClusterResult) -> Figure:
    """What each policy spends device time on, for the same tokens: shorter is better."""
    ranked = cluster.ranked
    per_token_s = {one.policy: cluster.num_devices / one.tokens_per_s for one in ranked}
    spent = {one.policy: _scaled(one.spent_s, per_token_s[one.policy] * 1e6) for one in ranked}
    used = [part for part in PARTS if any(parts[part] > 0 for parts in spent.values())]
    bars = [
        Bar(
            name=one.policy,
            parts=tuple(
                (f"p-{part}", f"{PARTS[part]}: {seconds(spent[one.policy][part])}", spent[one.policy][part])
                for part in used
            ),
            words=f"{per_token_s[one.policy] * 1e6:,.0f} device-s",
            strong=k == 0,
        )
        for k, one in enumerate(ranked)
    ]
    return Figure(
        title="Where the time goes",
        caption="Device-seconds that a million trained tokens take: the shorter the bar, the better.",
        chart=Chart(
            svg=stacked_bars(bars, label="Device-seconds per million tokens of each policy, by what they are spent on"),
            legend=tuple((f"p-{part}", PARTS[part]) for part in used),
            columns=("policy", *(PARTS[part] for part in used)),
            rows=tuple(
                (one.policy, *(share(spent[one.policy][part] / sum(spent[one.policy].values())) for part in used))
                for one in ranked
            ),
        ),
        missing="No time was spent.",
    )


def _scaled(spent_s: dict[str, float], total: float) -> dict[str, float]:
    """The same shares of another whole; every part is named."""
    whole = sum(spent_s.values())
    return {part: spent_s.get(part, 0.0) / whole * total if whole else 0.0 for part in PARTS}


def step_figures(cluster: ClusterResult) -> list[Figure]:
    """The same typical step under every policy."""
    fastest_s = min((step.timeline.step_time_s for step in cluster.steps.values()), default=0.0)
    figures = []
    for one in cluster.ranked:
        if (step := cluster.steps.get(one.policy)) is None:
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
                title=one.policy,
                caption=" ".join(sentences),
                chart=step_chart(
                    step.plan, step.timeline, end_s=end_s, label=f"Timeline of one step under {one.policy}"
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
        (one.policy, cluster.num_devices): one.tokens_per_s / cluster.num_devices
        for cluster in clusters
        for one in cluster.ranked
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
    """As many as there are colours: the fastest, and the two baselines everyone knows."""
    baselines = [name for name in (YARDSTICK, "padded") if name in names]
    others = [name for name in names if name not in baselines]
    kept = {*others[: NUM_COLOURS - len(baselines)], *baselines}
    return [name for name in names if name in kept]


def _powers(ticks: Sequence[float]) -> tuple[str, ...]:
    return tuple(count(2.0**tick) for tick in ticks)


def length_figure(comparison: Comparison) -> Figure:
    """How long the sequences are."""
    bins = comparison.length_bins
    caption = ""
    long = [one for one in bins if one.low >= 8192]
    if long and (num_tokens := sum(one.num_tokens for one in bins)):
        sequences = sum(one.num_sequences for one in long) / sum(one.num_sequences for one in bins)
        caption = (
            f"Sequences of {tokens(long[0].low)} tokens and more are {share(sequences)} of the sequences "
            f"and hold {share(sum(one.num_tokens for one in long) / num_tokens)} of the tokens."
        )
    return Figure(
        title="Sequence lengths",
        caption=caption,
        chart=length_histogram(bins, label="Lengths of the sequences, share of sequences and of tokens"),
        missing="The lengths are not known.",
    )
