"""Pipelines whose micro-batches are computed in slices of their tokens, one after another through the stages.

A slice attends to keys and values of the slices before it, so forwards run in order; its keys and values get gradients
from the slices behind it, so backwards run in reverse. The first backward waits for a micro-batch's last slice alone,
and the bubble is that of slices (TeraPipe, Li et al. 2021; SlimPipe, Li et al. 2025). A stage holds all slices of the
micro-batch in its backward, and of what comes next as many as 1F1B is ahead, as far as memory allows.

S stages, N slices of all micro-batches in issue order; a micro-batch that is not cut is one slice.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lengthwise.core.pass_order import Pass, PassKind, PipelineSchedule
from lengthwise.core.step_plan import Pipeline


def largest_share(num_slices: int) -> float:
    """The share of a micro-batch's tokens that its largest slice has at most.

    Of slices of equal work the first of a long sequence has the most tokens: a share of 1 / n of its attention is that
    of the first 1 / sqrt(n) of its tokens.
    """
    return num_slices**-0.5


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
    of its slices and S - 1 more as large as its largest; what each keeps follows from that.
    """
    state, num_stages = pipeline.state_bytes, pipeline.scheme.num_stages
    slices: list[Slice] = []
    for position, m in enumerate(pipeline.micro_batches):
        sizes, times_s = zip(*m.slices) if m.slices else ((m.pack.num_tokens,), (m.time_s,))
        in_flight = sum(sizes) + (num_stages - 1) * max(sizes)
        above_state, end = max(0, m.peak_bytes - state), 0
        for part, (size, time_s) in enumerate(zip(sizes, times_s)):
            end += size
            slices.append(
                Slice(
                    number=len(slices), micro_batch=position, part=part, tokens=range(end - size, end), time_s=time_s,
                    kept_bytes=above_state * size // in_flight, is_alone=len(sizes) == 1,
                )
            )  # fmt: skip
    return tuple(slices)


def is_sliced(pipeline: Pipeline) -> bool:
    """Whether any micro-batch is cut into slices."""
    return any(micro_batch.slices for micro_batch in pipeline.micro_batches)


def sliced_orders(
    counts: Sequence[int],
    kept_bytes: Sequence[int],
    *,
    limit_bytes: int,
    num_stages: int,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each stage in order, by the number of the slice; where nothing is cut, 1F1B or GPipe.

    Before each backward the last stage runs the forwards that it needs, and one more if all that it keeps then is no
    more than all slices of one micro-batch; every stage before runs one more than the stage behind it, and may keep the
    largest slice once more. A stage without others runs what it needs.

    Args:
        counts: slices of each micro-batch.
        kept_bytes: [N] what each slice keeps on each stage from its forward to its backward.
        limit_bytes: most that any stage keeps of all slices in flight.
        num_stages: of the pipeline.
        schedule: under GPipe all forwards come first.
    """
    ends = list(accumulate(counts))
    backwards = [number for count, end in zip(counts, ends) for number in range(end - 1, end - count - 1, -1)]
    needed = [end for count, end in zip(counts, ends) for _ in range(count)]
    if schedule is PipelineSchedule.GPIPE:
        return (_order([len(backwards)] * len(backwards), backwards),) * num_stages
    most_bytes = max((sum(kept_bytes[end - count : end]) for count, end in zip(counts, ends)), default=0)
    forwards_before, orders = needed, list[tuple[Pass, ...]]()
    for behind in range(num_stages):
        if num_stages > 1:
            may_keep = min(limit_bytes, most_bytes + behind * max(kept_bytes, default=0))
            ahead = _last_stage if behind == 0 else _one_more
            forwards_before = ahead(forwards_before, backwards, kept_bytes, may_keep)
        orders.append(_order(forwards_before, backwards))
    return tuple(reversed(orders))


def _last_stage(
    needed: Sequence[int], backwards: Sequence[int], kept_bytes: Sequence[int], limit_bytes: int
) -> list[int]:
    """How many forwards the last stage runs before each backward."""
    forwards_before: list[int] = []
    num_forwards, in_flight = 0, 0
    for number, least in zip(backwards, needed):
        is_room = (
            bool(forwards_before)
            and num_forwards < len(backwards)
            and in_flight + kept_bytes[num_forwards] <= limit_bytes
        )
        more = max(least, num_forwards + is_room)
        in_flight += sum(kept_bytes[num_forwards:more]) - kept_bytes[number]
        num_forwards = more
        forwards_before.append(num_forwards)
    return forwards_before


def _one_more(
    behind: Sequence[int], backwards: Sequence[int], kept_bytes: Sequence[int], limit_bytes: int
) -> list[int]:
    """How many forwards a stage runs before each backward; ``behind``: those of the stage behind it."""
    forwards_before: list[int] = []
    num_forwards, in_flight = 0, 0
    for number, least in zip(backwards, behind):
        in_flight += sum(kept_bytes[num_forwards:least])
        num_forwards = max(num_forwards, least)
        if num_forwards == least < len(backwards) and in_flight + kept_bytes[least] <= limit_bytes:
            in_flight += kept_bytes[least]
            num_forwards += 1
        in_flight -= kept_bytes[number]
        forwards_before.append(num_forwards)
    return forwards_before


def _order(forwards_before: Sequence[int], backwards: Sequence[int]) -> tuple[Pass, ...]:
    """Passes of a stage that runs so many forwards before each backward."""
    order: list[Pass] = []
    num_forwards = 0
    for count, number in zip(forwards_before, backwards):
        order += [(PassKind.FORWARD, forward) for forward in range(num_forwards, count)]
        order.append((PassKind.BACKWARD, number))
        num_forwards = max(num_forwards, count)
    return tuple(order)
