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


class FakeEvent:
    """An event of a device that reaches each event a tenth of a second after the one before."""

    recorded, synchronised = 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms, FakeEvent.recorded = 100.0 * FakeEvent.recorded, FakeEvent.recorded + 1

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms

    def synchronize(self):
        FakeEvent.synchronised += 1


def test_on_a_gpu_spans_are_those_of_the_device_and_the_host_waits_once():
    """Waiting for each span would keep the host from sending the next micro-batch's kernels ahead."""
    with (
        mock.patch.object(torch.cuda, "Event", FakeEvent),
        mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("waits for all streams")),
        mock.patch.object(torch.cuda, "current_stream", side_effect=AssertionError("waits for a stream")),
    ):
        clock = clock_on("cuda:1")
        with clock.span(SpanKind.COMPUTE, "forward 0"), clock.interruption(SpanKind.COMMUNICATE, "pull"):
            pass
        assert FakeEvent.synchronised == 0
        spans = clock.timeline(0).spans
    assert FakeEvent.synchronised == 1
    assert [span.name for span in spans] == ["forward 0", "pull", "forward 0"]
    assert [span.duration_s for span in spans] == pytest.approx([0.1, 0.1, 0.1])
    assert spans[0].start_s == pytest.approx(0.1)
