"""Spans follow one another, and measuring them waits for nothing that other ranks must do."""

from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.train.clock import StepClock


def clock_on(device):
    return StepClock(SimpleNamespace(device=torch.device(device), rank=0, size=1))


def test_an_interruption_cuts_a_span_in_two():
    clock = clock_on("cpu")
    with clock.span(SpanKind.COMPUTE, "forward 0"):
        with clock.interruption(SpanKind.COMMUNICATE, "pull"):
            pass
        with clock.interruption(SpanKind.COMMUNICATE, "pull"):
            pass
    with clock.span(SpanKind.COMPUTE, "backward 0"):
        pass
    spans = clock.timeline(3).spans
    assert [span.name for span in spans] == ["forward 0", "pull", "forward 0", "pull", "forward 0", "backward 0"]
    assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
    assert all(span.start_s <= span.end_s for span in spans)
    assert {(span.rank, clock.timeline(3).step) for span in spans} == {(0, 3)}


def test_zero_is_when_the_first_rank_started():
    clock = clock_on("cpu")
    with clock.span(SpanKind.PLAN):
        pass
    before = clock.timeline(0).spans[0].start_s
    clock.align(clock.since_start_s() + 100.0)
    assert clock.timeline(0).spans[0].start_s == pytest.approx(before + 100.0, abs=1.0)


def test_on_a_gpu_spans_wait_for_the_stream_that_computes_and_never_for_communication():
    """A message or a push may only end after other ranks have received what this one sends after the span."""
    stream = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream) as current,
        mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("waits for all streams")),
    ):
        clock = clock_on("cuda:1")
        with clock.span(SpanKind.COMPUTE), clock.interruption(SpanKind.COMMUNICATE):
            pass
    assert stream.synchronize.call_count == 4
    assert {call.args for call in current.call_args_list} == {(torch.device("cuda:1"),)}
