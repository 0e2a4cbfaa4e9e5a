"""Pipelines in virtual time: when each stage runs each pass. What is planned, simulated and shown is this.

1F1B is the schedule of PipeDream-Flush (Narayanan et al. 2021, section 2.2); where backwards are split, stages fill
their waits by :mod:`lengthwise.core.zero_bubble`. S stages, V micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from lengthwise.core.pass_order import Pass, PassKind, issue_order
from lengthwise.core.pipeline_config import PipelineConfig

MIXED_RECOMPUTE = 13 / 12
"""Times the flow shop's seconds that micro-batches of different recompute take at most; of equal recompute, once."""


class StagePass(NamedTuple):
    """A pass of one micro-batch, or of one of its slices, on one stage."""

    start_s: float
    end_s: float
    number: int
    """Which of all slices in issue order it computes; of all micro-batches, where none is cut."""
    kind: PassKind


class PassTimes(NamedTuple):
    """[V] seconds of the passes of one stage, in issue order; a place for each :class:`PassKind`."""

    forwards_s: Sequence[float]
    backwards_s: Sequence[float]
    """What a backward takes until the stage before can go on: all of it where it is whole."""
    weights_s: Sequence[float] = ()
    """What is left of a split backward."""


def forwards_in(recompute: Sequence[bool]) -> float:
    """How many forwards a micro-batch takes as long as: a backward is two, and recomputed layers run theirs again."""
    return 3.0 + sum(recompute) / len(recompute)


def least_stages(scheme: PipelineConfig) -> float:
    """Stages S' with which W + (S' - 1) x bounds a pipeline of work W per stage whose longest micro-batch, x, is first.

    In another order, which no plan of ours has, a pipeline can end sooner. The first stage starts its first backward
    after S forwards and S - 1 backwards of the longest micro-batch, and what it has done by then are at most S
    forwards. So only (S - 1) backwards of the bubble are certain: short micro-batches after long ones fill the rest. Of
    one number of recomputed layers in all micro-batches. Where backwards are split, only what cannot wait of these
    (S - 1) is certain: all but ``most_weights_in``. Of n slices of x the last stage waits for the forwards of the
    largest one on the others, an n-th of x's forward (S - 1) times at least, while it can do no more than those before.
    """
    if scheme.slices > 1:
        return 1 + (scheme.num_stages - 1) / scheme.slices / forwards_in(scheme.recompute)
    certain = 1 - 1 / forwards_in(scheme.recompute) - (most_weights_in(scheme.recompute) if scheme.zero_bubble else 0.0)
    return 1 + (scheme.num_stages - 1) * certain


def least_stages_in_any_order(scheme: PipelineConfig) -> float:
    """Stages S' with which W + (S' - 1) x bounds a pipeline of whole micro-batches, x the longest, wherever it comes.

    The last stage is done with x's backward no earlier than with all passes before it. The gradient goes up the stages
    in S - 1 backwards of x, and the first stage has left by then all that comes after x but the forwards of the S - 1
    micro-batches behind it, none longer than x's. So (S - 1) times what a backward is longer than a forward is certain.
    Where backwards are split, passes for gradients of weights may fill that, too. Slices are issued longest first.
    """
    if scheme.slices > 1:
        return least_stages(scheme)
    certain = 0.0 if scheme.zero_bubble else 1 - 2 / forwards_in(scheme.recompute)
    return 1 + (scheme.num_stages - 1) * certain


def most_weights_in(recompute: Sequence[bool]) -> float:
    """The largest share of a micro-batch's seconds that gradients of weights can take: where all is products.

    As long as a forward of the layers that are not recomputed, whose backwards alone are split.
    """
    return (1 - sum(recompute) / len(recompute)) / forwards_in(recompute)


def pipeline_end_s(times_s: Sequence[float], forwards: Sequence[float], num_stages: int) -> float:
    """Seconds from the first forward to the last backward; stages are equal, and messages between them take no time.

    Args:
        times_s: [V] seconds of each micro-batch on a stage, in issue order.
        forwards: [V] how many forwards each of them takes as long as, as ``forwards_in`` counts.
        num_stages: of the pipeline.
    """
    if num_stages == 1 or len(times_s) < 2:
        return sum(times_s) * num_stages
    forwards_s = [time_s / count for time_s, count in zip(times_s, forwards)]
    backwards_s = [time_s - forward_s for time_s, forward_s in zip(times_s, forwards_s)]
    return _equal_stages_end_s(forwards_s, backwards_s, num_stages)


def _equal_stages_end_s(forwards_s: Sequence[float], backwards_s: Sequence[float], num_stages: int) -> float:
    """When the last of the passes that ``run_stages`` lists ends, of equal stages: its sums, without the list.

    Once forward i has gone down the stages, the last stage can do backward i, the one before it backward i - 1, and so
    on.
    """
    count, last = len(forwards_s), num_stages - 1
    free_s = [0.0] * num_stages  # when each stage is done with what came before
    gradients_s = [[0.0] * count for _ in range(num_stages)]  # when each one is there
    for i in range(count + last):
        if i < count:
            end_s, forward_s = 0.0, forwards_s[i]
            for stage, begin_s in enumerate(free_s):
                free_s[stage] = end_s = (begin_s if begin_s > end_s else end_s) + forward_s
            gradients_s[last][i] = end_s
        for stage in range(last - max(0, i - count + 1), max(-1, last - i - 1), -1):
            number = i - (last - stage)
            begin_s, gradient_s = free_s[stage], gradients_s[stage][number]
            free_s[stage] = end_s = (begin_s if begin_s > gradient_s else gradient_s) + backwards_s[number]
            if stage:
                gradients_s[stage - 1][number] = end_s
    return max(free_s)


@dataclass(frozen=True, kw_only=True)
class UpdateParts:
    """Seconds of what an update consists of, each as if it had the links for itself.

    Weights are pulled in the order in which the first forward comes to them, and gradients are pushed in the order in
    which the last backward is done with them. So a forward waits for the input and its first layer in any case, and
    their gradients are pushed after everything else. What runs beneath a pass takes some of the device from it.
    """

    pull_s: float
    push_s: float
    first_pull_s: float
    """Of the pull, what is of the input and the first layer."""
    last_push_s: float
    """Of the push, what is of the input and the first layer."""
    rest_s: float
    """The norm and the optimizer, between push and pull."""
    slowdown: float = 0.0
    """Seconds by which a second of pull or push beneath a pass makes the pass longer, from 0 to 1."""

    @property
    def whole_s(self) -> float:
        """Seconds of the update where nothing runs beneath it."""
        return self.pull_s + self.push_s + self.rest_s

    @property
    def least_s(self) -> float:
        """Seconds that are exposed however long passes are."""
        return self.exposed_pull_s(math.inf) + self.exposed_push_s(math.inf) + self.rest_s

    def exposed_pull_s(self, cover_s: float) -> float:
        """Seconds by which pulls delay a pipeline whose first forward leaves the links free for ``cover_s``.

        Layers are alike, so that the delay of none is more than that of the first or that after the last.
        """
        return self.pull_s - (1.0 - self.slowdown) * min(self.pull_s - self.first_pull_s, cover_s)

    def exposed_push_s(self, cover_s: float) -> float:
        """Seconds of pushes after a pipeline whose last backward leaves the links free for ``cover_s``."""
        return self.push_s - (1.0 - self.slowdown) * min(self.push_s - self.last_push_s, cover_s)


def largest_parts(parts: Sequence[UpdateParts]) -> UpdateParts:
    """Each part as large as in the update where it is largest."""
    names = [field.name for field in fields(UpdateParts)]
    return UpdateParts(**{name: max(getattr(part, name) for part in parts) for name in names})


def update_cover_s(times_s: Sequence[float], forwards: Sequence[float]) -> float:
    """Seconds of passes that an update may run beneath: the step's last backward, the next one's first forward.

    Gradients are pushed beneath the last backward of the first stage, weights are pulled beneath the first forward of
    the next step, which is taken to be as long as that of this one.

    Args:
        times_s: [V] seconds of each micro-batch on a stage, in issue order, of the pipeline that ends last.
        forwards: [V] how many forwards each of them takes as long as.
    """
    return times_s[0] / forwards[0] + times_s[-1] * (1 - 1 / forwards[-1]) if len(times_s) else 0.0


def exposed_update_s(update_s: float, cover_s: float, overlap: float) -> float:
    """Seconds of an update that nothing hides, where a share ``overlap`` of it runs beneath ``cover_s`` of passes."""
    return update_s - min(overlap * update_s, cover_s)


def run_stages(
    times: Sequence[PassTimes],
    start_s: float = 0.0,
    transfer_s: float = 0.0,
    *,
    orders: Sequence[Sequence[Pass]] | None = None,
) -> tuple[tuple[StagePass, ...], ...]:
    """The passes of each stage, one after another.

    Args:
        times: seconds of the passes of each stage.
        start_s: when the first forward starts.
        transfer_s: from the end of a pass until the neighbouring stage has its result.
        orders: the passes of each stage in order; None: under 1F1B.
    """
    num_stages, count = len(times), len(times[0].forwards_s)
    last = num_stages - 1
    if orders is None:
        orders = [issue_order(s, num_stages=num_stages, num_micro_batches=count) for s in range(num_stages)]
    inputs = [[math.inf if stage else start_s] * count for stage in range(num_stages)]  # when each one is there
    gradients = [[math.inf] * count for _ in range(num_stages)]
    done: list[list[StagePass]] = [[] for _ in range(num_stages)]
    ready = inputs, gradients, [[start_s] * count] * num_stages
    while any(len(passes) < len(order) for passes, order in zip(done, orders)):
        for stage, (passes, order) in enumerate(zip(done, orders)):
            now_s = passes[-1].end_s if passes else start_s
            while len(passes) < len(order):
                kind, i = order[len(passes)]
                ready_s = ready[kind][stage][i]
                if ready_s == math.inf:
                    break
                begin_s = max(now_s, ready_s)
                now_s = begin_s + times[stage][kind][i]
                passes.append(StagePass(begin_s, now_s, i, kind))
                if kind is PassKind.BACKWARD and stage:
                    gradients[stage - 1][i] = now_s + transfer_s
                elif kind is PassKind.FORWARD and stage < last:
                    inputs[stage + 1][i] = now_s + transfer_s
                elif kind is PassKind.FORWARD:
                    gradients[stage][i] = now_s
    return tuple(map(tuple, done))
