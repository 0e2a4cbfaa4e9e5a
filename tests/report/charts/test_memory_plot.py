import re

import pytest

from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline
from lengthwise.core.wording import GIB
from lengthwise.report.charts.memory_plot import memory_chart
from lengthwise.report.charts.svg import WIDTH


def timeline_of(samples_of, *, step_time_s=10.0):
    """Ranks' (time, bytes) samples over a step."""
    return Timeline(
        step=0,
        num_ranks=len(samples_of),
        spans=tuple(
            Span(start_s=0.0, end_s=step_time_s, rank=rank, kind=SpanKind.COMPUTE) for rank in range(len(samples_of))
        ),
        memory=tuple(
            MemorySample(time_s=time_s, rank=rank, num_bytes=int(num_bytes))
            for rank, samples in enumerate(samples_of)
            for time_s, num_bytes in samples
        ),
    )


def test_a_line_is_a_staircase_from_the_first_sample_to_the_end_of_the_step():
    chart = memory_chart(timeline_of([[(0.0, 2 * GIB), (2.5, 4 * GIB), (5.0, GIB)]]), label="memory")
    (shape,) = re.findall(r'd="(M[^"]*)" class="line s0"', chart.svg)
    height = 200
    assert shape == f"M0 {height // 2}H{WIDTH // 4}V0H{WIDTH // 2}V{height * 3 // 4}H{WIDTH}"


def test_numbers_say_peak_when_and_least():
    chart = memory_chart(timeline_of([[(0.0, 2 * GIB), (2.5, 4 * GIB), (5.0, GIB), (6.0, 4 * GIB)]]), label="memory")
    assert chart.columns == ("", "peak", "at", "least")
    assert [cell.replace("\u00a0", " ") for cell in chart.rows[0]] == ["rank 0", "4.00 GiB", "2.50 s", "1.00 GiB"]


def test_ranks_with_equal_memory_share_a_line_and_the_highest_peak_comes_first():
    low, high = [(0.0, GIB)], [(0.0, 3 * GIB)]
    chart = memory_chart(timeline_of([low, high, low, low, low]), label="memory")
    assert chart.legend == (("s0", "rank 1"), ("s1", "ranks 0, 2, 3 and 1 more"))


@pytest.mark.parametrize("num_ranks", [6, 7, 100])
def test_of_many_lines_six_are_drawn_the_highest_and_the_lowest_among_them(num_ranks):
    chart = memory_chart(timeline_of([[(0.0, (rank + 1) * GIB)] for rank in range(num_ranks)]), label="memory")
    names = [name for _, name in chart.legend]
    assert len(names) == len(set(names)) == 6
    assert (names[0], names[-1]) == (f"rank {num_ranks - 1}", "rank 0")


def test_small_memory_is_drawn_in_mebibytes_and_long_lines_keep_their_peak():
    samples = [(k / 1000, 2**20 * (1 + k % 2 + 5 * (k == 777))) for k in range(1000)]
    chart = memory_chart(timeline_of([samples], step_time_s=1.0), label="memory")
    assert "MiB per device" in chart.svg
    assert chart.rows[0][1] == "7.00 MiB"
    assert chart.svg.count("V") < 450


@pytest.mark.parametrize("timeline", [Timeline(step=0, num_ranks=1, spans=()), timeline_of([[]])])
def test_no_samples_make_no_chart(timeline):
    assert memory_chart(timeline, label="memory") is None


def test_the_memory_of_a_device_is_a_line_that_the_axis_reaches():
    timeline = timeline_of([[(0.0, 2 * GIB), (2.5, 4 * GIB)]])
    chart = memory_chart(timeline, label="memory", device_bytes=40 * GIB)
    assert "memory of a device, 40.0 GiB" in chart.svg.replace("\u00a0", " ") and ">40<" in chart.svg
    assert "memory of a device" not in memory_chart(timeline, label="memory").svg
