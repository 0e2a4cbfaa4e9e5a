import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.timeline import Span, SpanKind, Timeline
from lengthwise.report.charts.bars import bar_chart, share_bar
from lengthwise.report.charts.gantt import MOST_ROWS, drawn, gantt_chart, shown_ranks
from lengthwise.report.charts.histogram import LengthBin, length_histogram
from lengthwise.report.charts.lines import LineStyle, Series, line_chart, thin
from lengthwise.report.charts.scatter import scatter_chart
from lengthwise.report.charts.svg import WIDTH
from tests.examples import examples

NASTY = '<b>"a" & b</b>'
MOST_BYTES = 6_000
MOST_BYTES_OF_LINES = 14_000
"""Sixty positions say the values of two series to who points at them."""
STYLE = LineStyle(x_title="step", y_title="loss")


def timeline(num_ranks: int, num_spans: int, *, step: int = 3) -> Timeline:
    spans = []
    for rank in range(num_ranks):
        for k in range(num_spans):
            kind = SpanKind.WAIT if k == num_spans - 1 else SpanKind.COMPUTE
            spans.append(Span(start_s=k * 0.1, end_s=(k + 1) * 0.1, rank=rank, kind=kind, name=NASTY))
    return Timeline(step=step, num_ranks=num_ranks, spans=tuple(spans))


def charts():
    bins = [LengthBin(low=1 << k, high=1 << (k + 1), num_sequences=k, num_tokens=k << k) for k in range(4, 17)]
    points = tuple((float(k), 1.0 + math.sin(k) / (k + 1)) for k in range(60))
    yield "lines", line_chart([Series(name=NASTY, points=points)] * 2, label=NASTY, style=STYLE)
    yield "lengths", length_histogram(bins, label=NASTY)
    yield "gantt", gantt_chart(timeline(4, 20), timeline(4, 20), label=NASTY)
    yield "bars", bar_chart([(NASTY, 3.0), ("none", None)], label=NASTY, quantity="tokens/s", relative=True)
    yield "shares", share_bar([(NASTY, "s0", 1.0), ("b", "s1", 3.0)], label=NASTY)
    yield "scatter", scatter_chart([(k, 0.1 + k / 100, 0.11 + k / 90) for k in range(30)], label=NASTY)


@pytest.mark.parametrize(("name", "chart"), list(charts()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_chart_is_well_formed_small_labelled_and_has_its_numbers(name, chart):
    root = ElementTree.fromstring(chart.svg)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == NASTY and root.find("title").text == NASTY
    assert chart.rows and all(len(row) == len(chart.columns) for row in chart.rows)
    assert len(chart.svg) < (MOST_BYTES_OF_LINES if name == "lines" else MOST_BYTES)
    assert "://" not in chart.svg and "nan" not in chart.svg.lower() and "inf" not in chart.svg


def titles(chart):
    return [title.text for title in ElementTree.fromstring(chart.svg).iter("title")]


def test_pointing_at_a_line_says_the_values_of_all_series_there_and_areas_fill_the_chart():
    values = {"a": 1.0, "b": 2.5}
    series = [
        Series(name=name, points=((0.0, low), (5.0, math.nan), (10.0, low + 1), (12.0, math.inf)))
        for name, low in values.items()
    ]
    chart = line_chart(series, label="x", style=STYLE)
    assert titles(chart)[-3:] == ["step 0: a 1.000, b 2.500", "step 5: a NaN, b NaN", "step 10: a 2.000, b 3.500"]
    areas = [tuple(map(float, area)) for area in re.findall(r'd="M([\d.]+) 0h([\d.]+)v', chart.svg)]
    assert areas[0][0] == 0 and sum(areas[-1]) == WIDTH
    assert all(sum(left) == right[0] for left, right in pairwise(areas))


def test_bars_dots_and_rows_of_ranks_say_their_values():
    assert "a: 3.000" in titles(bar_chart([("a", 3.0)], label="x", quantity="q"))
    assert "step 7: predicted 1.00\u00a0s, measured 2.00\u00a0s" in titles(scatter_chart([(7, 1.0, 2.0)], label="x"))
    assert "rank 0, compute: 300\u00a0ms" in titles(gantt_chart(timeline(1, 4), None, label="x"))


def test_a_timeline_says_its_length_and_where_its_labels_are_so_that_a_script_can_zoom():
    root = ElementTree.fromstring(gantt_chart(timeline(2, 10), None, label="x").svg)
    assert float(root.attrib["data-end"]) == pytest.approx(1.0)
    labels = [text for text in root.iter("text") if "data-at" in text.attrib]
    assert labels and all(text.attrib["x"] == f"{float(text.attrib['data-at']) * 100:g}%" for text in labels)


def test_parts_of_a_bar_never_reach_beyond_its_right_edge():
    for parts in range(2, 40):
        chart = share_bar([(str(k), "s0", 1.0 + k / 7) for k in range(parts)], label="x")
        rects = [rect.attrib for rect in ElementTree.fromstring(chart.svg).iter("rect")]
        assert all(float(r["x"].rstrip("%")) + float(r["width"].rstrip("%")) <= 100 + 1e-9 for r in rects)


def test_share_bar_pieces_fill_the_bar():
    chart = share_bar([("a", "s0", 1.0), ("b", "s1", 3.0)], label="x")
    assert [e.attrib["width"] for e in ElementTree.fromstring(chart.svg).iter("rect")] == ["25%", "75%"]
    assert chart.rows == (("a", "25.0\u00a0%"), ("b", "75.0\u00a0%"))


def test_bar_lengths_are_proportional():
    chart = bar_chart([("a", 10.0), ("b", 5.0), ("c", None)], label="x", quantity="q")
    rects = ElementTree.fromstring(chart.svg).iter("rect")
    assert [e.attrib["width"] for e in rects if e.attrib["class"].startswith("fill")] == ["100%", "50%", "0%"]


def test_shares_fill_their_bar_only_at_one():
    chart = bar_chart([("a", 0.5), ("b", 0.25)], label="x", quantity="q", full=1.0)
    rects = ElementTree.fromstring(chart.svg).iter("rect")
    assert [e.attrib["width"] for e in rects if e.attrib["class"].startswith("fill")] == ["50%", "25%"]


def test_a_chart_of_nothing_is_none():
    assert line_chart([Series(name="x", points=((0.0, math.nan),))], label="x", style=STYLE) is None
    assert line_chart([Series(name="x", points=((0.0, 1.0),))], label="x", style=STYLE) is None
    assert length_histogram([], label="x") is None
    assert gantt_chart(None, Timeline(step=0, num_ranks=1, spans=()), label="x") is None
    assert bar_chart([("a", None)], label="x", quantity="q") is None
    assert share_bar([], label="x") is None
    assert scatter_chart([], label="x") is None


def test_values_that_are_not_finite_leave_a_gap():
    points = ((0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0), (4.0, 1.5))
    shape = ElementTree.fromstring(line_chart([Series(name="x", points=points)], label="x", style=STYLE).svg)
    (line,) = [path for path in shape.iter("path") if path.attrib["class"].startswith("line")]
    assert line.attrib["d"].count("M") == 2 and line.attrib["d"].count("L") == 1


def test_thinning_keeps_extremes_and_order():
    points = [(float(k), 100.0 if k == 7777 else -5.0 if k == 31 else math.sin(k)) for k in range(10_000)]
    kept = thin(points)
    assert len(kept) <= 400 and kept == sorted(kept)
    assert (7777.0, 100.0) in kept and (31.0, -5.0) in kept


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.floats(0.001, 10), st.sampled_from(list(SpanKind))), min_size=1, max_size=400))
def test_drawn_stretches_cover_what_the_spans_cover(pieces):
    spans, now_s = [], 0.0
    for duration_s, kind in pieces:
        spans.append(Span(start_s=now_s, end_s=now_s + duration_s, rank=0, kind=kind))
        now_s += duration_s
    stretches = drawn(spans, now_s)
    assert sum(stop - start for start, stop, _ in stretches) == pytest.approx(now_s)
    assert all(left[1] <= right[0] + 1e-9 * now_s for left, right in pairwise(stretches))


@pytest.mark.parametrize("num_spans", [3, 300])
def test_planning_ahead_is_not_drawn(num_spans):
    ahead = Span(start_s=-0.5, end_s=-0.2, rank=0, kind=SpanKind.PLAN)
    across = Span(start_s=-0.1, end_s=0.0005, rank=0, kind=SpanKind.PLAN)
    step_s = 1.0 / num_spans
    work = [Span(start_s=k * step_s, end_s=(k + 1) * step_s, rank=0, kind=SpanKind.COMPUTE) for k in range(num_spans)]
    stretches = drawn([ahead, across, *work], 1.0)
    assert all(start >= 0 and stop <= 1 + 1e-9 for start, stop, _ in stretches)
    assert stretches[-1][2] is SpanKind.COMPUTE


def test_thousands_of_spans_stay_small_and_inside():
    chart = gantt_chart(timeline(8, 2000), timeline(8, 2000), label="x")
    assert len(chart.svg) < MOST_BYTES
    lefts = [float(x) for x in re.findall(r"M([\d.]+) ", chart.svg)]
    assert max(lefts) <= WIDTH


def test_alternating_short_spans_are_merged():
    spans = [Span(start_s=k * 1e-3, end_s=(k + 1) * 1e-3, rank=0, kind=list(SpanKind)[k % 6]) for k in range(6_000)]
    assert len(drawn(spans, 6.0)) <= 500


def test_of_many_ranks_the_busiest_and_the_least_busy_are_shown():
    spans = [Span(start_s=0, end_s=1 + (rank * 7 % 100) / 100, rank=rank, kind=SpanKind.COMPUTE) for rank in range(100)]
    ranks = shown_ranks(Timeline(step=0, num_ranks=100, spans=tuple(spans)))
    busy = [rank * 7 % 100 for rank in range(100)]
    assert len(ranks) == MOST_ROWS and busy.index(max(busy)) in ranks and busy.index(min(busy)) in ranks


def test_measured_and_predicted_share_the_time_scale():
    one = Timeline(step=0, num_ranks=1, spans=(Span(start_s=0, end_s=2.0, rank=0, kind=SpanKind.COMPUTE),))
    other = Timeline(step=0, num_ranks=1, spans=(Span(start_s=0, end_s=1.0, rank=0, kind=SpanKind.COMPUTE),))
    widths = re.findall(r"h([\d.]+)v", gantt_chart(one, other, label="x").svg)
    assert list(map(float, widths)) == [WIDTH, WIDTH / 2]


def test_histogram_drops_empty_ends_and_names_the_open_bin():
    bins = [
        LengthBin(low=0, high=8, num_sequences=0, num_tokens=0),
        LengthBin(low=8, high=16, num_sequences=3, num_tokens=30),
        LengthBin(low=16, high=None, num_sequences=1, num_tokens=90),
    ]
    chart = length_histogram(bins, label="x")
    assert chart.rows == (
        ("8 to 16", "3", "75.0\u00a0%", "30", "25.0\u00a0%"),
        ("16 and more", "1", "25.0\u00a0%", "90", "75.0\u00a0%"),
    )


def test_logarithmic_axis_refuses_what_is_not_positive():
    style = LineStyle(x_title="step", y_title="loss", log=True)
    assert line_chart([Series(name="x", points=((0.0, 0.0), (1.0, 5.0)))], label="x", style=style) is None
    assert line_chart([Series(name="x", points=((0.0, 0.01), (1.0, 5.0)))], label="x", style=style)
