import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.report.charts import ticks
from lengthwise.report.charts.ticks import MOST_TICKS, inner_ticks, log_ticks, nice_ticks, value_axis

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)
STEP_ROUNDING = 1e-6
"""Ticks are sums of binary fractions: a step is 1, 2 or 5 times a power of ten only this closely."""


@example(0.0, 5e-324)
@example(1e-310, 2e-310)
@example(-1e-281, 1e-279)
@given(FINITE, FINITE)
def test_nice_ticks_enclose_the_range_evenly_with_few_round_steps(a, b):
    low, high = min(a, b), max(a, b)
    found = nice_ticks(low, high)
    steps = [right - left for left, right in pairwise(found)]
    slack = 1e-6 * max(steps)
    assert found[0] <= low + slack and found[-1] >= high - slack
    assert 2 <= len(found) <= MOST_TICKS + 1
    assert max(steps) - min(steps) <= STEP_ROUNDING * max(steps)
    leading = steps[0] / 10 ** math.floor(math.log10(steps[0]) + STEP_ROUNDING)
    assert min(abs(leading - nice) for nice in (1, 2, 5, 10)) < 1e-4


@given(FINITE, st.floats(min_value=1e-6, max_value=1e12))
def test_inner_ticks_stay_inside_and_are_few(low, width):
    found = inner_ticks(low, low + width)
    assert len(found) <= MOST_TICKS + 1
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in found)


@given(st.floats(min_value=1e-9, max_value=1e9), st.floats(min_value=1, max_value=1e9))
def test_log_ticks_enclose_the_range(low, factor):
    found = log_ticks(low, low * factor)
    assert found[0] <= low * (1 + 1e-6) and found[-1] >= low * factor * (1 - 1e-6)
    assert 2 <= len(found) <= 9 and list(found) == sorted(set(found))


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_every_value_lies_on_its_axis_and_labels_differ(values):
    axis = value_axis(values)
    assert all(-1e-6 <= axis.at(value) <= 1 + 1e-6 for value in values)
    assert len(axis.labels) == len(axis.ticks)


def test_whole_ticks_are_whole():
    assert inner_ticks(0, 2, whole=True) == (0, 1, 2)
    assert nice_ticks(0, 1, whole=True) == (0, 1)


def test_known_ticks():
    assert nice_ticks(0.0, 10.0) == (0, 2, 4, 6, 8, 10)
    assert nice_ticks(0.13, 0.87) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert nice_ticks(5, 5)[0] < 5 < nice_ticks(5, 5)[-1]
    assert log_ticks(0.03, 900) == (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


def test_labels_have_the_decimals_of_the_step_and_one_unit():
    assert ticks.plain_labels((0.0, 0.2, 0.4)) == ("0.0", "0.2", "0.4")
    assert ticks.plain_labels((0, 20_000, 40_000)) == ("0", "20k", "40k")
    assert ticks.second_labels((0.0, 0.05, 0.1)) == ("0", "50 ms", "100 ms")
    assert ticks.second_labels((0.5, 1.0, 1.5)) == ("0.5 s", "1.0 s", "1.5 s")
    assert ticks.share_labels((0.0, 0.005, 0.01)) == ("0.0 %", "0.5 %", "1.0 %")
