"""The operations of every rank in a step, derived from the plan alone, and the proof that they never deadlock.

A rank pulls weights, receives, computes and sends micro-batches as its stage's schedule says, and pushes gradients. The
runtime executes these lists and nothing else, so that what is proven of them holds of the run.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import NoReturn

from lengthwise.core.errors import CheckError
from lengthwise.core.pass_order import PassKind, PipelineSchedule
from lengthwise.core.pipeline_config import GradientShare, Method, WeightShard
from lengthwise.core.sliced_passes import Slice, slices_of
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.token_placement import share_size, share_sizes
from lengthwise.core.zero_bubble import pass_orders


class OperationKind(StrEnum):
    """What an operation does."""

    PULL = "pull"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    SEND = "send"
    RECEIVE = "receive"
    PUSH = "push"


MESSAGES = (OperationKind.SEND, OperationKind.RECEIVE)
PASSES = {
    PassKind.FORWARD: OperationKind.FORWARD,
    PassKind.BACKWARD: OperationKind.BACKWARD,
    PassKind.WEIGHTS: OperationKind.WEIGHTS,
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing a rank does, with whom."""

    kind: OperationKind
    ranks: tuple[int, ...]
    """The sender and the receiver of a message; else the ranks that take part, ascending."""
    what: str
    """Everything that decides which collectives the operation runs; equal on all ranks that take part."""
    pipeline: int = -1
    """Position in the plan; -1: of all."""
    micro_batch: int = -1
    """Position in the pipeline."""
    number: int = -1
    """Which of the pipeline's slices in issue order it is of; of its micro-batches, where none is cut."""
    is_backward: bool = False
    """Whether a message is a gradient."""
    num_tokens: int = 0
    """Tokens of a message."""

    def __str__(self) -> str:
        if self.kind in MESSAGES:
            verb, (sender, receiver) = str(self.kind), self.ranks
            other = f"to rank {receiver}" if self.kind is OperationKind.SEND else f"from rank {sender}"
            return f"{verb} {self.what} {other}, {self.num_tokens:,} tokens"
        return f"run the {self.kind} {self.what} with ranks {_named(self.ranks)}"


@dataclass(frozen=True, kw_only=True)
class WeightPhase:
    """Phases one after another in which every rank has the same weights and shares of gradients, if any."""

    phases: range
    holdings: tuple[WeightShard | None, ...]
    gradient_shares: tuple[GradientShare | None, ...]
    """What each rank keeps of the gradients of its weights; None: all of them."""


def weight_phases_of(plan: StepPlan) -> tuple[WeightPhase, ...]:
    """The phases of a plan, joined where neither weights nor gradients need to move between them."""
    joined: list[tuple[range, list[tuple[WeightShard, GradientShare | None] | None]]] = []
    for phase in range(plan.num_phases):
        of_ranks = [
            None if shard is None else (shard, share)
            for shard, share in zip(plan.holdings(phase), plan.gradient_shares(phase))
        ]
        if joined and all(a == b or a is None or b is None for a, b in zip(joined[-1][1], of_ranks)):
            phases, before = joined[-1]
            joined[-1] = range(phases.start, phase + 1), [a or b for a, b in zip(before, of_ranks)]
        else:
            joined.append((range(phase, phase + 1), of_ranks))
    return tuple(
        WeightPhase(
            phases=phases,
            holdings=tuple(None if of_rank is None else of_rank[0] for of_rank in of_ranks),
            gradient_shares=tuple(None if of_rank is None else of_rank[1] for of_rank in of_ranks),
        )
        for phases, of_ranks in joined
    )


RankOperations = tuple[tuple[Operation, ...], ...]
"""The operations of every rank."""


def operations(
    plan: StepPlan, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B, *, forward_only: bool = False
) -> tuple[tuple[WeightPhase, RankOperations], ...]:
    """For every weight phase, the operations of every rank; ``forward_only``: without backwards and pushes."""
    everyone = tuple(range(plan.num_devices))
    operations_of = []
    for number, weight_phase in enumerate(weight_phases_of(plan)):
        name = f"{number} (phases {weight_phase.phases.start} to {weight_phase.phases.stop - 1})"
        lists: list[list[Operation]] = [[_moving(OperationKind.PULL, name, everyone)] for _ in everyone]
        for position, pipeline in sorted(enumerate(plan.pipelines), key=lambda item: item[1].phase):
            if pipeline.phase in weight_phase.phases:
                for rank, steps in _of_pipeline(position, pipeline, schedule, forward_only=forward_only):
                    lists[rank] += steps
        for operations_of_rank in lists if not forward_only else ():
            operations_of_rank.append(_moving(OperationKind.PUSH, name, everyone))
        operations_of.append((weight_phase, tuple(map(tuple, lists))))
    return tuple(operations_of)


def _moving(kind: OperationKind, name: str, everyone: tuple[int, ...]) -> Operation:
    return Operation(kind=kind, ranks=everyone, what=f"of weight phase {name}")


def _of_pipeline(
    position: int, pipeline: Pipeline, schedule: PipelineSchedule, *, forward_only: bool
) -> Iterator[tuple[int, list[Operation]]]:
    """The operations of every rank of a pipeline."""
    num_stages, slices = pipeline.scheme.num_stages, slices_of(pipeline)
    for stage, of_stage in enumerate(pass_orders(pipeline, schedule)):
        order = [item for item in of_stage if not forward_only or item[0] is PassKind.FORWARD]
        split = {number for kind, number in order if kind is PassKind.WEIGHTS}
        passes = [
            _pass(position, pipeline, slices[number], stage, kind, is_split=number in split) for kind, number in order
        ]
        for place, rank in enumerate(pipeline.ranks_of(stage)):
            steps: list[Operation] = []
            for (kind, number), stage_pass in zip(order, passes):
                if kind is PassKind.WEIGHTS:  # nobody waits for these gradients before the step's end
                    steps.append(stage_pass)
                    continue
                part, is_backward = slices[number], kind is PassKind.BACKWARD
                source, target = (stage + 1, stage - 1) if is_backward else (stage - 1, stage + 1)
                message = partial(_message, position, pipeline, part, place, is_backward=is_backward)
                if 0 <= source < num_stages:
                    steps.append(message(between=(source, stage), sends=False))
                steps.append(stage_pass)
                if 0 <= target < num_stages:
                    steps.append(message(between=(stage, target), sends=True))
            yield rank, steps


def _pass(position: int, pipeline: Pipeline, part: Slice, stage: int, kind: PassKind, *, is_split: bool) -> Operation:
    micro_batch = pipeline.micro_batches[part.micro_batch]
    how = _how(
        pipeline.scheme.layers_of_stage(stage), pipeline.methods_of(micro_batch), pipeline.recompute_of(micro_batch)
    )
    if kind is PassKind.BACKWARD and pipeline.scheme.shard_gradients:
        how += f", gradients of each unit reduced to {pipeline.scheme.degree} shares"
    if kind is PassKind.BACKWARD and is_split:
        how += ", gradients of weights later"
    tokens = "" if part.is_alone else f"tokens {part.tokens.start} to {part.tokens.stop - 1} of "
    return Operation(
        kind=PASSES[kind],
        ranks=pipeline.ranks_of(stage),
        what=(
            f"of micro-batch {part.name} of pipeline {position}, stage {stage}: {tokens}sequences "
            f"{_named(micro_batch.pack.ids)}, {how}"
        ),
        pipeline=position,
        micro_batch=part.micro_batch,
        number=part.number,
    )


@lru_cache(maxsize=4096)
def _how(layers: range, methods: tuple[Method, ...], recompute: tuple[bool, ...]) -> str:
    """Methods and flags of the layers of a stage in words; most passes of a plan share theirs."""
    used = [str(methods[layer]) for layer in layers]
    flags = "".join(str(int(recompute[layer])) for layer in layers)
    words = f"layers {layers.start} to {layers.stop - 1} by {'+'.join(dict.fromkeys(used))}, recompute {flags}"
    return f"{words}, in turn {','.join(used)}" if len(set(used)) > 1 else words


def _message(
    position: int, pipeline: Pipeline, part: Slice, place: int, *, between: tuple[int, int], is_backward: bool,
    sends: bool,
) -> Operation:  # fmt: skip
    source, target = between
    return Operation(
        kind=OperationKind.SEND if sends else OperationKind.RECEIVE,
        ranks=(pipeline.ranks_of(source)[place], pipeline.ranks_of(target)[place]),
        what=f"the {'gradient' if is_backward else 'output'} of micro-batch {part.name} of pipeline {position}",
        pipeline=position,
        micro_batch=part.micro_batch,
        number=part.number,
        is_backward=is_backward,
        num_tokens=_share_size(pipeline, part, place),
    )


def _share_size(pipeline: Pipeline, part: Slice, place: int) -> int:
    """Tokens of a slice on the rank at ``place`` of each stage."""
    micro_batch, degree = pipeline.micro_batches[part.micro_batch], pipeline.scheme.degree
    if not micro_batch.placement:
        return share_size(len(part.tokens), place, degree)
    return share_sizes(micro_batch.pack.computed_lengths, micro_batch.placement, degree)[place]


def shares_of(plan: StepPlan, rank: int) -> set[int]:
    """How many tokens ``rank`` holds of what each of its passes computes."""
    return {
        _share_size(pipeline, part, pipeline.ranks_of(stage).index(rank))
        for pipeline in plan.pipelines
        for stage in range(pipeline.scheme.num_stages)
        if rank in pipeline.ranks_of(stage)
        for part in slices_of(pipeline)
    }


def _named(numbers: Sequence[int], max_shown: int = 8) -> str:
    shown = ",".join(map(str, numbers[:max_shown]))
    return shown if len(numbers) <= max_shown else f"{shown},... ({len(numbers)})"


def check_matching(lists: Sequence[Sequence[Operation]], *, step: int) -> None:
    """Raise ``CheckError`` unless the ranks, each doing its list in order, all come to its end.

    Messages do not wait to be received; whatever several ranks do together waits for all of them, and all must mean
    the same. Messages from one rank to another, outputs and gradients each by themselves, arrive in the order in which
    they are sent, and none is left over.
    """
    matcher = _Matcher(lists, step)
    matcher.run()


class _Matcher:
    def __init__(self, lists: Sequence[Sequence[Operation]], step: int) -> None:
        self._lists, self._step = lists, step
        self._at = [0] * len(lists)
        self._sent: dict[tuple[int, int, bool], deque[Operation]] = {}
        self._come: dict[Operation, int] = {}  # of what several do together: how many of its ranks, in order, are there

    def run(self) -> None:
        waiting = deque(range(len(self._lists)))
        while waiting:
            waiting.extend(self._advance(waiting.popleft()))
        if stuck := [rank for rank in range(len(self._lists)) if self._next(rank) is not None]:
            self._fail(stuck[0])
        for messages in self._sent.values():
            if messages:
                sender, receiver = messages[0].ranks
                self._disagree(sender, messages[0], receiver, None)

    def _next(self, rank: int) -> Operation | None:
        done = self._at[rank]
        return self._lists[rank][done] if done < len(self._lists[rank]) else None

    def _advance(self, rank: int) -> list[int]:
        """Go on with one rank as far as it can; returns the ranks that may go on because of it."""
        freed: list[int] = []
        while (operation := self._next(rank)) is not None:
            if operation.kind is OperationKind.SEND:
                self._channel(operation).append(operation)
                freed.append(operation.ranks[1])
            elif operation.kind is OperationKind.RECEIVE:
                messages = self._channel(operation)
                if not messages:
                    break
                if not _is_same_message(messages[0], operation):
                    self._disagree(messages[0].ranks[0], messages[0], rank, operation)
                messages.popleft()
            elif self._is_complete(operation):
                for other in operation.ranks:
                    self._at[other] += other != rank
                freed += [other for other in operation.ranks if other != rank]
            else:
                break
            self._at[rank] += 1
        return freed

    def _is_complete(self, operation: Operation) -> bool:
        """Whether all ranks of an operation have come to it. They stay until then, so each is looked at once."""
        come, ranks = self._come.pop(operation, 0), operation.ranks
        while come < len(ranks) and self._next(ranks[come]) == operation:
            come += 1
        if come < len(ranks):
            self._come[operation] = come
        return come == len(ranks)

    def _channel(self, message: Operation) -> deque[Operation]:
        return self._sent.setdefault((*message.ranks, message.is_backward), deque())  # type: ignore[arg-type]

    def _fail(self, rank: int) -> None:
        """Name a rank that cannot go on and the one it waits for: the last of those that wait for one another."""
        seen: set[int] = set()
        while True:
            operation = self._next(rank)
            assert operation is not None
            seen.add(rank)
            other = next(peer for peer in operation.ranks if peer != rank and self._next(peer) != operation)
            if other in seen or self._next(other) is None:
                self._disagree(rank, operation, other, self._next(other))
            rank = other

    def _disagree(self, a: int, of_a: Operation, b: int, of_b: Operation | None) -> NoReturn:
        raise CheckError(
            f"step {self._step} is not run, its ranks would wait for ever: next, rank {a} would {of_a}; rank {b} "
            f"would {of_b or 'do nothing more'}"
        )


def _is_same_message(a: Operation, b: Operation) -> bool:
    return (a.what, a.num_tokens) == (b.what, b.num_tokens)
