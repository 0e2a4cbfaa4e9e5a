"""The page of a comparison, from made-up results."""

import re
from xml.etree import ElementTree

import pytest

from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import Span, SpanKind, Timeline
from lengthwise.report.charts.histogram import LengthBin
from lengthwise.report.charts.lanes import MOST_ROWS, num_lanes, shown_lanes, step_chart
from lengthwise.report.charts.stacked import Bar, stacked_bars
from lengthwise.report.pages.compare_figures import scaling_figure, step_figures
from lengthwise.report.pages.compare_page import render_comparison
from lengthwise.report.pages.compare_results import (
    PARTS,
    ClusterResult,
    ComparedStep,
    Comparison,
    PolicyResult,
    fastest_first,
    headline,
)
from lengthwise.report.pages.sweep_results import slower_with_more, sweep_figure


def make_pipeline(first, degree, stages, *, loads=(1.0,), phase=0):
    """A pipeline on ranks from ``first`` on, with a micro-batch for every load in seconds."""
    method = Method.ULYSSES if degree > 1 else Method.DENSE
    return Pipeline(
        ranks=tuple(range(first, first + degree * stages)),
        scheme=uniform_scheme(4, degree=degree, stages=stages, method=method),
        phase=phase,
        micro_batches=tuple(
            PlannedMicroBatch(pack=Pack(ids=(first * 100 + k,), lengths=(10,)), time_s=load, peak_bytes=1)
            for k, load in enumerate(loads)
        ),
    )


def make_plan(*pipelines):
    return StepPlan(
        step=3, policy="x", pipelines=pipelines, loss_normaliser=1, update_s=0.5, time_s=3.0, lower_bound_s=2.0
    )


def make_step(*pipelines, time_s=2.0):
    """Every rank computes one second, then waits, then updates."""
    plan = make_plan(*pipelines)
    spans = [
        Span(start_s=start_s, end_s=end_s, rank=rank, kind=kind)
        for rank in range(plan.num_devices)
        for start_s, end_s, kind in (
            (0.0, 1.0, SpanKind.COMPUTE), (1.0, time_s - 0.5, SpanKind.WAIT), (time_s - 0.5, time_s, SpanKind.UPDATE),
        )
    ]  # fmt: skip
    return ComparedStep(plan=plan, timeline=Timeline(step=3, num_ranks=plan.num_devices, spans=tuple(spans)))


def make_result(policy, tokens_per_s, **more):
    spent_s = {"compute": 6.0, "communicate": 1.0, "bubble": 0.5, "imbalance": 1.5, "switch": 0.0, "update": 1.0}
    return PolicyResult(policy=policy, tokens_per_s=tokens_per_s, step_time_s=1.0, spent_s=spent_s, **more)


def make_cluster(*policies, num_devices=8, **more):
    return ClusterResult(
        num_devices=num_devices, cluster=f"1x{num_devices}xH100-80GB", tokens_per_step=1000, policies=policies, **more
    )


def make_comparison(*clusters, **more):
    defaults = {
        "model": "llama-7b", "device": "H100-80GB", "source": "my <lengths>.npy", "num_steps": 20,
        "facts": (("Model", "a & b"),),
        "length_bins": (LengthBin(low=0, high=1024, num_sequences=90, num_tokens=500),
                        LengthBin(low=1024, high=None, num_sequences=10, num_tokens=500)),
    }  # fmt: skip
    return Comparison(clusters=clusters, **{**defaults, **more})


def charts(page):
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg role="img".*?</svg>(?=</div>)', page, re.DOTALL)]


def test_every_number_stands_on_a_page_that_needs_nothing_else():
    steps = {"auto": make_step(make_pipeline(0, 8, 1)), "static": make_step(make_pipeline(0, 4, 2))}
    page = render_comparison(
        make_comparison(make_cluster(make_result("static", 1000.0), make_result("auto", 1500.0, gap=0.02), steps=steps))
    )
    for words in ("1,500", "1.50x", "2.0\u00a0%", "1 x &lt;4,2&gt; ulysses", "a &amp; b", "my &lt;lengths&gt;.npy"):
        assert words in page
    assert page.count("<script") == 1 and "http:" not in page and "https:" not in page and "src=" not in page
    assert re.findall(r'<div data-policy="([^"]*)">', page) == ["auto", "static"]
    assert re.findall(r'<tr data-policy="([^"]*)">', page) == ["auto", "static"]
    assert page.count('download="') == len(charts(page)) + 1  # and the table of policies
    assert "auto, compute: " in page and "auto: 1,500" in page  # who points at a bar reads its value
    assert len(charts(page)) == 5


def test_a_curve_follows_the_size_that_varies_with_a_line_for_each_other_size():
    def point(num_devices, budget, over):
        results = make_result("static", 100.0), make_result("auto", 100.0 * over)
        return make_cluster(*results, num_devices=num_devices, token_budget=budget)

    swept = [point(n, budget, over) for n, budget, over in ((8, 1000, 1.2), (8, 2000, 1.1), (16, 1000, 1.4))]
    chart = sweep_figure(swept).chart
    assert chart.columns == ("tokens per step", "8 GPUs", "16 GPUs")
    assert chart.rows == (("1K", "1.20x", "1.40x"), ("2K", "1.10x", "n/a"))
    grown = sweep_figure([point(8, 1000, 1.2), point(16, 2000, 1.4)]).chart  # steps grow with the cluster
    assert grown.columns == ("devices", "auto") and grown.rows == (("8", "1.20x"), ("16", "1.40x"))
    assert ElementTree.fromstring(chart.svg) is not None and chart.svg.count("<circle") == 3


@pytest.mark.parametrize(
    ("speeds", "sentence"),
    [
        (
            {"static": 100.0, "auto": 150.0, "packed": 120.0},
            "auto trains 150 tokens per second on 8 devices: 1.50 times as many as static "
            "and 1.25 times as many as packed, the next best.",
        ),
        (
            {"static": 100.0, "auto": 150.0},
            "auto trains 150 tokens per second on 8 devices: 1.50 times as many as static, the next best.",
        ),
        (
            {"static": 100.0, "auto": 80.0},
            "static trains 100 tokens per second on 8 devices: 1.25 times as many as auto, the next best.",
        ),
        (
            {"static": 100.0, "auto": 100.2},
            "auto trains 100 tokens per second on 8 devices: about as many as static, the next best.",
        ),
        ({"auto": 80.0}, "auto trains 80 tokens per second on 8 devices."),
    ],
)
def test_the_headline_says_who_is_fastest_whoever_that_is(speeds, sentence):
    assert headline(make_cluster(*(make_result(name, speed) for name, speed in speeds.items()))) == sentence


def test_the_headline_says_that_devices_are_idle():
    sentence = headline(make_cluster(make_result("auto", 100.0, num_used=6), num_devices=7))
    assert sentence == (
        "auto trains 100 tokens per second on 6 of 7 devices. 1 device computes nothing, yet takes part in every "
        "update: a cluster of 6 may be faster."
    )
    assert "may be faster" not in headline(make_cluster(make_result("auto", 100.0, num_used=7), num_devices=7))


def test_refused_policies_have_a_reason_and_no_bar():
    refused = PolicyResult(policy="padded", refused="needs 99 GiB <here>")
    page = render_comparison(make_comparison(make_cluster(make_result("static", 1000.0), refused)))
    assert "needs 99 GiB &lt;here&gt;" in page
    assert page.count(">padded<") == 1


def test_a_cluster_without_any_policy_has_its_reasons_and_the_others_their_charts():
    refused = PolicyResult(policy="static", refused="too small")
    page = render_comparison(
        make_comparison(make_cluster(refused, num_devices=2), make_cluster(make_result("static", 10.0)))
    )
    assert "too small" in page and "2 devices, 1,000 tokens a step" in page


def test_pieces_of_a_bar_fill_it():
    bar = Bar(name="a", parts=(("p-compute", "x", 3.0), ("p-bubble", "y", 1.0)), words="4")
    half = Bar(name="b", parts=(("p-compute", "x", 2.0),), words="2")
    drawn = ElementTree.fromstring(stacked_bars([bar, half], label="bars"))
    pieces = [(r.get("x"), r.get("width")) for r in drawn.iter("rect") if str(r.get("class")).startswith("fill")]
    assert pieces == [("0%", "75%"), ("75%", "25%"), ("0%", "50%")]


def test_nothing_spent_draws_nothing():
    assert stacked_bars([Bar(name="a", parts=(), words="")], label="bars") == ""


def test_all_stages_are_shown_while_there_is_room():
    plan = make_plan(make_pipeline(0, 4, 2), make_pipeline(8, 2, 4))
    assert [(lane.stage, lane.ranks) for lane in shown_lanes(plan)] == [
        (0, (0, 1, 2, 3)), (1, (4, 5, 6, 7)), (0, (8, 9)), (1, (10, 11)), (2, (12, 13)), (3, (14, 15)),
    ]  # fmt: skip
    assert num_lanes(plan) == 6


def test_of_many_pipelines_the_busiest_and_the_least_busy_of_each_scheme_are_shown_whole():
    wide = [make_pipeline(8 * k, 4, 2, loads=(float(k + 1),)) for k in range(20)]
    narrow = [make_pipeline(160 + k, 1, 1, loads=(float(k + 1),)) for k in range(40)]
    plan = make_plan(*wide, *narrow)
    lanes = shown_lanes(plan)
    first_ranks = {lane.pipeline.ranks[0] for lane in lanes}
    assert len(lanes) <= MOST_ROWS
    assert {0, 8 * 19, 160, 160 + 39} <= first_ranks
    assert all(
        sum(other.pipeline is lane.pipeline for other in lanes) == lane.pipeline.scheme.num_stages for lane in lanes
    )


def test_a_pipeline_longer_than_the_chart_is_still_shown():
    lanes = shown_lanes(make_plan(*(make_pipeline(4 * k, 1, 4) for k in range(30))))
    assert 1 <= len(lanes) <= MOST_ROWS


def test_a_row_is_drawn_for_every_lane_and_its_numbers_say_what_it_does():
    step = make_step(make_pipeline(0, 2, 2, loads=(1.0, 0.5)), make_pipeline(4, 4, 1))
    chart = step_chart(step.plan, step.timeline, end_s=2.0, label="a step")
    assert [row[:4] for row in chart.rows] == [
        ("0-1", "<2,2> ulysses", "1", "2"), ("2-3", "<2,2> ulysses", "2", "2"), ("4-7", "<4,1> ulysses", "1", "1"),
    ]  # fmt: skip
    assert {row[-1] for row in chart.rows} == {"25.0\u00a0%"}
    assert ElementTree.fromstring(chart.svg) is not None


def test_slow_policies_do_not_squeeze_the_time_axis_of_the_others():
    steps = {
        "auto": make_step(make_pipeline(0, 8, 1), time_s=2.0),
        "static": make_step(make_pipeline(0, 8, 1), time_s=4.0),
        "padded": make_step(make_pipeline(0, 8, 1), time_s=40.0),
    }
    policies = (make_result("auto", 30.0), make_result("static", 20.0), make_result("padded", 10.0))
    figures = {figure.title: figure for figure in step_figures(make_cluster(*policies, steps=steps))}
    own = "time axis of its own"
    assert [own in figures[name].caption for name in ("auto", "static", "padded")] == [False, False, True]


def test_phases_are_told_one_after_another():
    plan = make_plan(make_pipeline(0, 4, 1), make_pipeline(0, 2, 1, phase=1), make_pipeline(2, 2, 1, phase=1))
    assert plan.strategy_words == "1 x <4,1> ulysses, then 2 x <2,1> ulysses"


def test_scaling_is_per_device_and_says_where_a_policy_is_refused():
    small = make_cluster(make_result("static", 80.0), PolicyResult(policy="auto", refused="no"), num_devices=8)
    large = make_cluster(make_result("static", 120.0), make_result("auto", 160.0), num_devices=16)
    figure = scaling_figure((small, large))
    assert fastest_first((small, large)) == ["auto", "static"]
    assert figure.chart.columns == ("devices", "auto", "static")
    assert figure.chart.rows == (("8", "refused", "10"), ("16", "10", "8"))


def test_more_policies_than_colours_leave_some_to_the_table():
    names = ["auto", "a", "b", "c", "d", "e", "static", "padded"]
    clusters = [
        make_cluster(*(make_result(name, 100.0 - k) for k, name in enumerate(names)), num_devices=n) for n in (8, 16)
    ]
    figure = scaling_figure(clusters)
    assert [name for _, name in figure.chart.legend] == ["auto", "a", "b", "c", "static", "padded"]
    assert figure.caption.endswith("Not drawn, but among the numbers: d, e.")


def test_json_has_no_number_for_what_is_refused():
    refused = PolicyResult(policy="padded", refused="too large")
    document = make_cluster(make_result("static", 1000.0), refused).to_json()
    first, second = document["policies"]
    assert first["refused"] is None and set(first["time_shares"]) == set(PARTS)
    assert {key for key, value in second.items() if value is not None} == {"policy", "refused"}


def test_a_cluster_that_is_slower_than_a_smaller_one_is_named_on_the_page():
    sizes = {4: 400.0, 8: 900.0, 9: 800.0, 16: 1500.0}
    clusters = [
        make_cluster(make_result("auto", speed, num_used=min(size, 8)), num_devices=size, token_budget=1000)
        for size, speed in sizes.items()
    ]
    words = "9 devices are slower than 8: 800 tokens per second against 900."
    assert slower_with_more(clusters) == [words]
    assert words in render_comparison(make_comparison(*clusters))


def test_clusters_with_other_networks_or_steps_are_not_held_against_one_another():
    def at(size, speed, **more):
        return make_cluster(make_result("auto", speed), num_devices=size, **more)

    assert not slower_with_more([at(8, 900.0, network_gbit_per_s=400), at(9, 800.0, network_gbit_per_s=100)])
    budgets = [at(8, 900.0, token_budget=2), at(9, 800.0, token_budget=1), at(8, 700.0, token_budget=1)]
    assert not slower_with_more(budgets)
    grown = slower_with_more([at(8, 900.0, token_budget=8), at(9, 800.0, token_budget=9)])
    assert grown == ["9 devices are slower than 8: 800 tokens per second against 900."]
