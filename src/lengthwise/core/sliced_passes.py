"""Pipelines whose micro-batches are computed in slices of their tokens, one after another through the stages.

A slice attends to keys and values of the slices before it, so forwards run in order; its keys and values get gradients
from the slices behind it, so backwards run in reverse. The first backward waits for a micro-batch's last slice alone,
and the bubble is that of slices (TeraPipe, Li et al. 2021; SlimPipe, Li et al. 2025). A stage holds all slices of the
micro-batch in its backward, and of what comes next as many as 1F1B is ahead, as far as memory allows.

S stages, N slices of all micro-batches in issue order; a micro-batch that is not cut is one slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from lengthwise.core.one_f_one_b import PassTimes
from lengthwise.core.pass_order import Pass, PassKind
from lengthwise.core.step_plan import Pipeline

TOLERANCE = 1e-6
"""Relative, of sums of seconds that are equal but for rounding."""
POSTPONED = 0.7
"""Of what a stage waits from the last forward of a micro-batch to its first backward, which is twice the passes of a
slice on each stage behind but for what the slices of others take; least idle on ramps of 2 to 8 stages."""


class Rule(NamedTuple):
    """How many forwards stages run before each backward; see :func:`sliced_orders`."""

    is_eager: bool
    """Whether the last stage runs one more than it needs where there is room."""
    multiple: int
    """Of a forward, for how long stages compute later ones while they wait for its slice's gradient."""
    postponed: float
    """How many passes of a slice, for each stage behind, the backwards take that a stage puts off until it has run all
    forwards of the next micro-batch that is cut: those before its own, beneath which it waits for that one's."""


RULES = tuple(
    Rule(is_eager, multiple, postponed)
    for postponed in (POSTPONED, 0.0)
    for is_eager in (True, False)
    for multiple in (1, 2, 5)
)


def largest_share(num_slices: int) -> float:
    """The share of a micro-batch's tokens that its largest slice has at most.

    Of slices of equal work the first of a long sequence has the most tokens: a share of 1 / n of its attention is that
    of the first 1 / sqrt(n) of its tokens. Stages hold the largest slice several times, so of many slices none has more
    than twice the mean's tokens, and the first ones less work.
    """
    return min(num_slices**-0.5, 2 / num_slices)


def kept_bytes_of(sizes: Sequence[int], above_state: int, num_stages: int) -> list[int]:
    """What each stage keeps of each slice of a micro-batch, from its forward to its backward.

    ``above_state``: bytes of the first stage, beside the model state, with all slices in flight and num_stages - 1 more
    as large as :func:`largest_share` allows, or as the largest if it is larger.
    """
    num_tokens = sum(sizes)
    in_flight = num_tokens + (num_stages - 1) * max(*sizes, ceil(largest_share(len(sizes)) * num_tokens))
    return [above_state * size // in_flight for size in sizes]


class Slice(NamedTuple):
    """Consecutive tokens of a micro-batch that are computed by passes of their own; all of them where it is not cut."""

    number: int
    """Which of the pipeline's slices it is in issue order."""
    micro_batch: int
    """Position in the pipeline."""
    part: int
    """Which slice of the micro-batch it is."""
    tokens: range
    """Of the pack."""
    time_s: float
    """Predicted seconds of forward and backward on one stage."""
    kept_bytes: int
    """What each stage keeps of it from its forward to its backward."""
    is_alone: bool
    """Whether it is all of the micro-batch."""

    @property
    def name(self) -> str:
        """The number of the micro-batch and, if it is cut, that of the slice: ``3.1``."""
        return str(self.micro_batch) if self.is_alone else f"{self.micro_batch}.{self.part}"


def slices_of(pipeline: Pipeline) -> tuple[Slice, ...]:
    """The slices of all micro-batches in issue order.

    A micro-batch's peak is that of the first stage with S micro-batches as large in flight, or if it is cut with all
    of its slices and S - 1 large ones more; what each keeps follows from that.
    """
    state, num_stages = pipeline.state_bytes, pipeline.scheme.num_stages
    slices: list[Slice] = []
    for position, m in enumerate(pipeline.micro_batches):
        sizes, times_s = zip(*m.slices) if m.slices else ((m.pack.num_tokens,), (m.time_s,))
        kept_bytes, end = kept_bytes_of(sizes, max(0, m.peak_bytes - state), num_stages), 0
        for part, (size, time_s) in enumerate(zip(sizes, times_s)):
            end += size
            slices.append(
                Slice(
                    number=len(slices), micro_batch=position, part=part, tokens=range(end - size, end), time_s=time_s,
                    kept_bytes=kept_bytes[part], is_alone=len(sizes) == 1,
                )
            )  # fmt: skip
    return tuple(slices)


def is_sliced(pipeline: Pipeline) -> bool:
    """Whether any micro-batch is cut into slices."""
    return any(micro_batch.slices for micro_batch in pipeline.micro_batches)


class SlicedEnd(NamedTuple):
    """When the last pass ends, and under which rule; inf where that is no sooner than what was asked for."""

    end_s: float
    rule: Rule


class SlicedOrders(NamedTuple):
    """The passes of each stage in order, by the number of the slice, and when the last of them ends."""

    end_s: float
    orders: tuple[tuple[Pass, ...], ...]


def sliced_orders(
    counts: Sequence[int], times: PassTimes, kept_bytes: Sequence[int], *, limit_bytes: int, num_stages: int
) -> SlicedOrders:
    """The passes under 1F1B; where nothing is cut, in its usual order.

    Before each backward the last stage runs the forwards that it needs, and by some rules one more if all that it keeps
    then is no more than all slices of one micro-batch. Every stage before runs one more than the stage behind it, or as
    many short ones as take a multiple of that of the slice whose gradient it waits for, and may keep the largest slice
    once more. A stage without others runs what it needs. Of these rules the one is taken whose last pass ends first.

    Args:
        counts: slices of each micro-batch.
        times: seconds of the passes of each slice, the same on every stage.
        kept_bytes: [N] what each slice keeps on each stage from its forward to its backward.
        limit_bytes: most that any stage keeps of all slices in flight.
        num_stages: of the pipeline.
    """
    pipeline = _Slices(counts, times, kept_bytes, limit_bytes, num_stages)
    (end_s, _), stages = pipeline.fastest()
    return SlicedOrders(end_s, tuple(_order(forwards, pipeline.backwards) for forwards in reversed(stages)))


def sliced_end(
    counts: Sequence[int],
    times: PassTimes,
    kept_bytes: Sequence[int],
    *,
    limit_bytes: int,
    num_stages: int,
    limit_s: float = inf,
    rules: Sequence[Rule] = RULES,
) -> SlicedEnd:
    """When the last pass of :func:`sliced_orders` ends under ``rules``, found out faster where that is no sooner than
    ``limit_s``.
    """
    return _Slices(counts, times, kept_bytes, limit_bytes, num_stages).fastest(limit_s, rules)[0]


def forwards_first(counts: Sequence[int], num_stages: int) -> tuple[tuple[Pass, ...], ...]:
    """The passes under GPipe; ``counts``: slices of each micro-batch."""
    backwards = _backwards(counts)
    return (_order([len(backwards)] * len(backwards), backwards),) * num_stages


def _backwards(counts: Sequence[int]) -> list[int]:
    """Slices in the order of their backwards."""
    ends = accumulate(counts)
    return [number for count, end in zip(counts, ends) for number in range(end - 1, end - count - 1, -1)]


@dataclass
class _StageClock:
    """How far a stage is."""

    forwards_before: Sequence[int]
    inputs: list[float]
    """When the input of each slice is there."""
    gradients: list[float]
    """When that of its output is."""
    left_s: float
    """Of its passes."""
    now_s: float = 0.0
    num_forwards: int = 0
    num_backwards: int = 0

    def advance(
        self,
        forwards_s: Sequence[float],
        backwards_s: Sequence[float],
        order: Sequence[int],
        *,
        before: list[float] | None,
        behind: list[float],
    ) -> None:
        """Run passes while what they need is there; ``before`` and ``behind``: when neighbours have what they give."""
        now_s, forward, backward, count = self.now_s, self.num_forwards, self.num_backwards, len(order)
        inputs, gradients, forwards_before, done_s = self.inputs, self.gradients, self.forwards_before, 0.0
        while backward < count:
            while forward < forwards_before[backward] and inputs[forward] < inf:
                now_s = max(now_s, inputs[forward]) + forwards_s[forward]
                behind[forward] = now_s
                done_s += forwards_s[forward]
                forward += 1
            number = order[backward]
            if forward < forwards_before[backward] or gradients[number] == inf:
                break
            now_s = max(now_s, gradients[number]) + backwards_s[number]
            if before is not None:
                before[number] = now_s
            done_s += backwards_s[number]
            backward += 1
        self.now_s, self.num_forwards, self.num_backwards, self.left_s = now_s, forward, backward, self.left_s - done_s


class _Slices:
    """The slices of one pipeline, and how many forwards its stages run before each backward."""

    def __init__(
        self, counts: Sequence[int], times: PassTimes, kept_bytes: Sequence[int], limit_bytes: int, num_stages: int
    ) -> None:
        ends = list(accumulate(counts))
        self.backwards, self._times, self._kept_bytes = _backwards(counts), times, kept_bytes
        self._limit_bytes, self._num_stages = limit_bytes, num_stages
        self._most_bytes = max((sum(kept_bytes[end - count : end]) for count, end in zip(counts, ends)), default=0)
        self._kept_until = np.array([0, *accumulate(kept_bytes)], dtype=np.int64)
        self._until_s = np.array([0.0, *accumulate(times.forwards_s)])
        """Of the forwards before each one."""
        self._awaited_s = np.array([times.forwards_s[number] for number in self.backwards])
        """Of the forward of the slice of each backward."""
        freed_bytes = accumulate((kept_bytes[number] for number in self.backwards), initial=0)
        self._freed_bytes = np.array([*freed_bytes][:-1], dtype=np.int64)
        """By the backwards before each one."""
        self.needed = [end for count, end in zip(counts, ends) for _ in range(count)]
        self._next_cut_end, self._before_next_s, self._next_slice_s = self._next_cut(counts)

    def fastest(self, limit_s: float = inf, rules: Sequence[Rule] = RULES) -> tuple[SlicedEnd, Sequence[Sequence[int]]]:
        """When the last pass ends under the fastest rule, and the forwards that each stage runs, the last first."""
        if self._num_stages == 1:
            return SlicedEnd(self._end_s([self.needed], limit_s), rules[0]), [self.needed]
        lasts = {
            is_eager: self.last_stage() if is_eager else self.needed for is_eager in {rule.is_eager for rule in rules}
        }
        seen: dict[bytes, list[list[int]]] = {}
        best: SlicedEnd | None = None
        for rule in rules:
            stages = self._stages(lasts[rule.is_eager], rule)
            if (key := stages.tobytes()) in seen:
                continue
            seen[key] = stages.tolist()
            end_s = self._end_s(seen[key], min(best.end_s if best else inf, limit_s))
            if best is None or end_s < best.end_s:
                best, orders = SlicedEnd(end_s, rule), seen[key]
        assert best is not None, "there are rules"
        return best, orders

    def _end_s(self, forwards_before: Sequence[Sequence[int]], limit_s: float) -> float:
        """When the last pass ends, inf where that is seen to be no sooner than ``limit_s``; ``forwards_before``: of the
        last stage and those before it.
        """
        (forwards_s, backwards_s, _), order, count = self._times, self.backwards, len(self.backwards)
        left_s = sum(forwards_s) + sum(backwards_s)
        stages = [_StageClock(forwards, [inf] * count, [inf] * count, left_s) for forwards in reversed(forwards_before)]
        stages[0].inputs[:] = [0.0] * count
        while any(stage.num_backwards < count for stage in stages):
            for number, stage in enumerate(stages):
                before = stages[number - 1].gradients if number else None
                behind = stages[number + 1].inputs if number + 1 < len(stages) else stage.gradients
                stage.advance(forwards_s, backwards_s, order, before=before, behind=behind)
                if stage.now_s + stage.left_s >= limit_s * (1 + TOLERANCE):
                    return inf
        end_s = max((stage.now_s for stage in stages), default=0.0)
        return end_s if end_s < limit_s else inf

    def _next_cut(self, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[N] for each backward, of the next micro-batch that is cut: where its forwards end, the seconds of backwards
        from this one to its first, inf if there is none, and of the passes of its largest slice.
        """
        forwards_s, backwards_s, _ = self._times
        ends, before_s, slices_s = np.zeros((3, len(self.backwards)))
        end, next_end, left_s, slice_s = len(self.backwards), 0, inf, 0.0
        for count in reversed(counts):
            for place in range(end - 1, end - count - 1, -1):
                left_s += backwards_s[self.backwards[place]]
                ends[place], before_s[place], slices_s[place] = next_end, left_s, slice_s
            if count > 1:
                slice_s = max(forwards_s[k] + backwards_s[k] for k in range(end - count, end))
                next_end, left_s = end, 0.0
            end -= count
        return ends.astype(np.int64), before_s, slices_s

    def _stages(self, last: Sequence[int], rule: Rule) -> np.ndarray:
        """[S, N] the forwards of every stage, the last first, whose own are given."""
        stages, largest = [np.array(last, dtype=np.int64)], max(self._kept_bytes, default=0)
        for behind in range(1, self._num_stages):
            may_keep = min(self._limit_bytes, self._most_bytes + behind * largest)
            in_memory = np.searchsorted(self._kept_until, may_keep + self._freed_bytes, side="right") - 1
            is_postponed = self._before_next_s <= rule.postponed * behind * self._next_slice_s
            later = np.where(is_postponed, np.minimum(in_memory, self._next_cut_end), 0)
            forwards = np.maximum(self._before(stages[-1], rule.multiple, in_memory), later)
            stages.append(np.maximum.accumulate(forwards))
        return np.stack(stages)

    def last_stage(self) -> list[int]:
        """The forwards of the last stage where it runs one more than it needs whenever there is room."""
        kept_bytes, limit_bytes = self._kept_bytes, min(self._limit_bytes, self._most_bytes)
        forwards_before: list[int] = []
        num_forwards, in_flight = 0, 0
        for number, least in zip(self.backwards, self.needed):
            is_room = (
                bool(forwards_before)
                and num_forwards < len(self.backwards)
                and in_flight + kept_bytes[num_forwards] <= limit_bytes
            )
            more = max(least, num_forwards + is_room)
            in_flight += sum(kept_bytes[num_forwards:more]) - kept_bytes[number]
            num_forwards = more
            forwards_before.append(num_forwards)
        return forwards_before

    def _before(self, behind: np.ndarray, multiple: float, in_memory: np.ndarray) -> np.ndarray:
        """[N] the forwards of a stage; ``behind``: of the stage behind it; ``in_memory``: for which it has room."""
        until_s = self._until_s[behind] + (multiple + TOLERANCE) * self._awaited_s
        in_time = np.searchsorted(self._until_s, until_s, side="right") - 1
        wanted: np.ndarray = np.maximum(behind, np.minimum(in_memory, np.maximum(in_time, behind + 1)))
        return wanted


def _order(forwards_before: Sequence[int], backwards: Sequence[int]) -> tuple[Pass, ...]:
    """Passes of a stage that runs so many forwards before each backward."""
    order: list[Pass] = []
    num_forwards = 0
    for count, number in zip(forwards_before, backwards):
        order += [(PassKind.FORWARD, forward) for forward in range(num_forwards, count)]
        order.append((PassKind.BACKWARD, number))
        num_forwards = max(num_forwards, count)
    return tuple(order)
