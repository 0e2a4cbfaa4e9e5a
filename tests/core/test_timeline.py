import pytest

from lengthwise.core.timeline import PUSH, Span, SpanKind, Timeline, merge


def span(rank, start_s, end_s, kind=SpanKind.COMPUTE, name=""):
    return Span(start_s=start_s, end_s=end_s, rank=rank, kind=kind, name=name)


def push(rank, start_s, end_s):
    return span(rank, start_s, end_s, SpanKind.COMMUNICATE, PUSH)


def waits(*spans, num_ranks):
    """(rank, start, end) of what ``with_waits`` finds that ranks only wait for."""
    found = Timeline(step=0, num_ranks=num_ranks, spans=spans).with_waits()
    assert all(one.start_s <= one.end_s for one in found.spans)
    return sorted((s.rank, s.start_s, s.end_s) for s in found.spans if s.kind is SpanKind.WAIT)


def test_idle_is_what_is_neither_computed_nor_communicated():
    timeline = Timeline(step=0, num_ranks=2, spans=(span(0, 0, 4), span(1, 0, 1), span(1, 1, 4, SpanKind.WAIT)))
    assert timeline.step_time_s == 4
    assert timeline.idle_fraction == pytest.approx(3 / 8)
    assert timeline.imbalance == pytest.approx(4 / 2.5)


def test_waiting_for_the_slowest_rank_is_cut_out_of_the_push():
    layout = [span(rank, 0, 1, SpanKind.COMMUNICATE, "layout") for rank in (0, 1)]
    spans = (*layout, span(0, 1, 4), span(1, 1, 2), push(0, 4, 5), push(1, 2, 5))
    timeline = Timeline(step=0, num_ranks=2, spans=spans).with_waits()
    assert timeline.time_s(SpanKind.WAIT, 1) == 2
    assert timeline.time_s(SpanKind.COMMUNICATE, 1) == 1 + 1
    assert timeline.time_s(SpanKind.WAIT, 0) == 0
    assert timeline.time_s(SpanKind.COMMUNICATE, 0) == 1 + 1
    assert timeline.step_time_s == 5 and timeline.time_s(SpanKind.COMPUTE) == 4


def test_each_push_of_a_step_is_cut_at_its_own_last_arrival():
    spans = push(0, 5, 8), push(1, 1, 4), push(0, 3, 4), push(1, 7, 8)  # in any order
    assert waits(*spans, num_ranks=2) == [(0, 5, 7), (1, 1, 3)]


def test_other_communication_is_never_cut():
    pulls = [span(rank, rank, 4, SpanKind.COMMUNICATE, "pull") for rank in (0, 1)]
    assert waits(*pulls, push(0, 5, 6), push(1, 5, 6), num_ranks=2) == []


def test_a_rank_that_recorded_no_push_holds_up_nobody():
    assert waits(span(0, 0, 9), push(1, 1, 5), push(2, 3, 5), num_ranks=3) == [(1, 1, 3)]


def test_a_push_that_ends_before_the_last_arrival_is_all_wait():
    """Clocks of two machines differ by what a collective takes."""
    assert waits(push(0, 1, 2), push(1, 3, 4), num_ranks=2) == [(0, 1, 2)]


def test_a_push_that_takes_no_time_stays():
    timeline = Timeline(step=0, num_ranks=2, spans=(push(0, 2, 2), push(1, 2, 2))).with_waits()
    assert timeline.spans == (push(0, 2, 2), push(1, 2, 2))


def test_ranks_merge_into_one_timeline():
    parts = [Timeline(step=7, num_ranks=2, spans=(span(rank, 0, rank + 1),)) for rank in range(2)]
    assert merge(parts).step_time_s == 2
    assert merge(parts).num_ranks == 2


def test_an_empty_timeline_has_no_time_and_no_idle():
    empty = Timeline(step=0, num_ranks=1, spans=())
    assert empty.step_time_s == 0
    assert empty.idle_fraction == 0
    assert empty.imbalance == 1
