"""Pipelines whose backwards are split, so that stages compute gradients of weights where they would wait.

After ZB-H1 of Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241), for micro-batches of unequal length.
A backward sends the gradient of a stage's input on before the gradients of weights are there; these are a pass of their
own. Forwards and backwards keep the order of 1F1B. Weight passes run in the order of micro-batches:

* before a forward, if the stage would hold more than S micro-batches otherwise, those counted whose weight pass is yet
  to come. So no stage holds more than the first one does under 1F1B;
* where the next forward or backward is not there yet;
* last.

How long a pass that delays the next one may exceed the wait is tried; what ends first is taken. One of the tries is to
run each weight pass at once: there every pass begins no later than under 1F1B, so that nothing ends later.

The order is decided in virtual time, from the seconds in the plan alone: simulator, proof and every rank of the runtime
come to the same. The first stage sends no gradient on, and splits nothing. S stages, V micro-batches.
"""

import math
from collections import deque
from collections.abc import Sequence

from lengthwise.core.one_f_one_b import PassTimes, forwards_in
from lengthwise.core.pass_order import Pass, PassKind, PipelineSchedule, issue_order
from lengthwise.core.sliced_passes import forwards_first, is_sliced, sliced_orders, slices_of
from lengthwise.core.step_plan import Pipeline

AT_ONCE = math.inf
EXCESSES = (0.0, 0.5, 1.0, AT_ONCE)
"""Shares of a weight pass that may be beyond the wait it begins in: tried in turn."""


def pass_times(pipeline: Pipeline) -> PassTimes:
    """Predicted seconds of the passes of a pipeline's stages by slice, backwards whole."""
    forwards = [forwards_in(pipeline.recompute_of(m)) for m in pipeline.micro_batches]
    slices = slices_of(pipeline)
    forwards_s = [part.time_s / forwards[part.micro_batch] for part in slices]
    backwards_s = [part.time_s - forward_s for part, forward_s in zip(slices, forwards_s)]
    if not pipeline.scheme.zero_bubble:
        return PassTimes(forwards_s, backwards_s, [0.0] * len(forwards_s))
    weights_s = [
        min(m.weights_s, backward_s * (1 - m.comm_s / m.time_s) if m.time_s else 0.0)  # of plans by hand, too
        for m, backward_s in zip(pipeline.micro_batches, backwards_s)
    ]
    return PassTimes(forwards_s, backwards_s, weights_s)


def splits(pipeline: Pipeline, stage: int, number: int) -> bool:
    """Whether ``stage`` splits the backward of the micro-batch ``number``."""
    return stage > 0 and pass_times(pipeline).weights_s[number] > 0


def pass_orders(
    pipeline: Pipeline, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each stage of a pipeline in order, by the number of their slice. Under GPipe all backwards are
    whole.
    """
    num_stages, count = pipeline.scheme.num_stages, len(pipeline.micro_batches)
    if is_sliced(pipeline):
        counts = [max(1, len(m.slices)) for m in pipeline.micro_batches]
        if schedule is PipelineSchedule.GPIPE:
            return forwards_first(counts, num_stages)
        limit_bytes = max(max(0, m.peak_bytes - pipeline.state_bytes) for m in pipeline.micro_batches)
        kept_bytes = [part.kept_bytes for part in slices_of(pipeline)]
        times = pass_times(pipeline)
        return sliced_orders(counts, times, kept_bytes, limit_bytes=limit_bytes, num_stages=num_stages).orders
    if pipeline.scheme.zero_bubble and schedule is PipelineSchedule.ONE_F_ONE_B:
        return filled_orders(pass_times(pipeline), num_stages)
    return tuple(
        tuple(issue_order(stage, num_stages=num_stages, num_micro_batches=count, schedule=schedule))
        for stage in range(num_stages)
    )


def stage_times(times: PassTimes, stage: int) -> PassTimes:
    """Seconds of the passes of ``stage``, from those with whole backwards."""
    if not stage:
        return times
    return times._replace(
        backwards_s=[time_s - weights_s for time_s, weights_s in zip(times.backwards_s, times.weights_s)]
    )


def filled_orders(times: PassTimes, num_stages: int) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each stage in order, with weight passes in the waits of the others.

    ``times``: the same on every stage, backwards whole.
    """
    fillings = _fillings(times, num_stages)
    fastest = min(fillings, key=lambda filling: filling.end_s)
    return tuple(map(tuple, fastest.orders))


def filled_end_s(times: PassTimes, num_stages: int, *, excesses: Sequence[float] = EXCESSES) -> float:
    """Seconds from the first forward to the last pass by the best of ``excesses``; see :func:`filled_orders`."""
    return min(filling.end_s for filling in _fillings(times, num_stages, excesses))


def _fillings(times: PassTimes, num_stages: int, excesses: Sequence[float] = EXCESSES) -> list["_Filling"]:
    of_stages = [stage_times(times, stage) for stage in range(num_stages)]
    return [_Filling(of_stages, excess) for excess in excesses]


class _Filling:
    """The passes of one pipeline, decided stage by stage as far as what they wait for is known."""

    def __init__(self, times: Sequence[PassTimes], excess: float) -> None:
        num_stages, count = len(times), len(times[0].forwards_s)
        self._times, self._excess = times, excess
        self._left = [
            deque(issue_order(stage, num_stages=num_stages, num_micro_batches=count)) for stage in range(num_stages)
        ]
        self._inputs_s = [[math.inf if stage else 0.0] * count for stage in range(num_stages)]  # when each is there
        self._gradients_s = [[math.inf] * count for _ in range(num_stages)]
        self._now_s = [0.0] * num_stages
        self._waiting: list[deque[int]] = [deque() for _ in range(num_stages)]
        self._in_flight = [0] * num_stages
        self.orders: list[list[Pass]] = [[] for _ in range(num_stages)]
        while any(self._left):
            for stage in range(num_stages):
                self._advance(stage)
        for stage, waiting in enumerate(self._waiting):
            while waiting:
                self._fill(stage)
        self.end_s = max(self._now_s)
        """Seconds from the first forward to the last pass."""

    def _advance(self, stage: int) -> None:
        """Run passes of a stage until one needs what is not known yet."""
        left, now_s, times, last = self._left[stage], self._now_s, self._times[stage], len(self._times) - 1
        ready = self._inputs_s[stage], self._gradients_s[stage]
        while left:
            kind, number = left[0]
            ready_s = ready[kind][number]
            if ready_s == math.inf:
                return
            if self._waiting[stage] and self._fills(stage, kind, ready_s):
                self._fill(stage)
                continue
            left.popleft()
            self.orders[stage].append((kind, number))
            now_s[stage] = end_s = max(now_s[stage], ready_s) + times[kind][number]
            if kind is PassKind.FORWARD:
                self._in_flight[stage] += 1
                following = self._gradients_s[stage] if stage == last else self._inputs_s[stage + 1]
                following[number] = end_s
                continue
            self._in_flight[stage] -= 1
            if stage:
                self._gradients_s[stage - 1][number] = end_s
                if times.weights_s[number] > 0:
                    self._waiting[stage].append(number)

    def _fills(self, stage: int, next_kind: PassKind, ready_s: float) -> bool:
        """Whether a weight pass comes before the next pass, which can begin at ``ready_s``."""
        if self._excess == AT_ONCE:
            return True
        waiting = self._waiting[stage]
        if next_kind is PassKind.FORWARD and self._in_flight[stage] + len(waiting) >= len(self._times):
            return True
        wait_s = ready_s - self._now_s[stage]
        return wait_s > 0 and self._times[stage].weights_s[waiting[0]] * (1 - self._excess) <= wait_s

    def _fill(self, stage: int) -> None:
        number = self._waiting[stage].popleft()
        self.orders[stage].append((PassKind.WEIGHTS, number))
        self._now_s[stage] += self._times[stage].weights_s[number]
