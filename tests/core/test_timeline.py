import pytest

from lengthwise.core.timeline import Span, SpanKind, Timeline, merge


def span(rank, start_s, end_s, kind=SpanKind.COMPUTE):
    return Span(start_s=start_s, end_s=end_s, rank=rank, kind=kind)


def test_idle_is_what_is_neither_computed_nor_communicated():
    timeline = Timeline(step=0, num_ranks=2, spans=(span(0, 0, 4), span(1, 0, 1), span(1, 1, 4, SpanKind.WAIT)))
    assert timeline.step_time_s == 4
    assert timeline.idle_fraction == pytest.approx(3 / 8)
    assert timeline.imbalance == pytest.approx(4 / 2.5)


def test_waiting_for_the_slowest_rank_is_cut_out_of_the_first_collective():
    push = [span(0, 4, 5, SpanKind.COMMUNICATE), span(1, 1, 5, SpanKind.COMMUNICATE)]
    later = span(1, 5, 6, SpanKind.COMMUNICATE)
    timeline = Timeline(step=0, num_ranks=2, spans=(span(0, 0, 4), span(1, 0, 1), *push, later)).with_waits()
    assert timeline.time_s(SpanKind.WAIT, 1) == 3
    assert timeline.time_s(SpanKind.COMMUNICATE, 1) == 2
    assert timeline.time_s(SpanKind.WAIT, 0) == 0


def test_ranks_merge_into_one_timeline():
    parts = [Timeline(step=7, num_ranks=2, spans=(span(rank, 0, rank + 1),)) for rank in range(2)]
    assert merge(parts).step_time_s == 2
    assert merge(parts).num_ranks == 2


def test_an_empty_timeline_has_no_time_and_no_idle():
    empty = Timeline(step=0, num_ranks=1, spans=())
    assert empty.step_time_s == 0
    assert empty.idle_fraction == 0
    assert empty.imbalance == 1
