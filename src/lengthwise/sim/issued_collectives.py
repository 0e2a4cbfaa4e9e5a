"""Whether the collectives that ranks issued are those of their proven operations, in the same order on every rank."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from lengthwise.core.layout import shard_size
from lengthwise.core.parameter_shapes import stage_unit_sizes
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.sim.schedule_check import MESSAGES, PASSES, Operation, OperationKind, operations

Issued = Mapping[str, Any]
"""One collective: operation, kind, ranks, num_bytes."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
POINT_TO_POINT = ("send", "receive")
PLACES = tuple(map(str, PASSES.values()))
"""First words of operations that compute micro-batches."""
REDUCTIONS = ("reduce_scatter", "all_reduce")
"""As a reduce-scatter is recorded: Gloo's is an all-reduce."""
UNEQUAL = ("all_to_all",)
"""Collectives of which every rank gives and gets other sizes."""


def differences_from_plan(
    plan: StepPlan, issued: Mapping[int, Sequence[Issued]], *, schedule: PipelineSchedule, model: ModelSpec, dtype: str
) -> list[str]:
    """Sentences on what differs from the proven lists, or between ranks of one group; none: all is as planned."""
    row_bytes = model.hidden_size * WIDTHS[dtype]
    planned = operations(plan, schedule)
    differences = []
    for rank, collectives in issued.items():
        steps = [operation for _, lists in planned for operation in lists[rank]]
        differences += _messages(rank, steps, collectives, row_bytes)
        differences += _reductions(plan, rank, steps, collectives, model)
        groups = {operation.ranks for operation in steps if operation.kind not in MESSAGES}
        everyone = tuple(range(plan.num_devices))
        for collective in collectives:
            ranks, place = tuple(collective["ranks"]), collective["operation"].partition(" ")[0]
            if place in PLACES and collective["kind"] not in POINT_TO_POINT:
                moves_weights = set(ranks) <= set(everyone) and place != "forward"
                if ranks not in groups and not moves_weights:
                    differences.append(
                        f"rank {rank}, {collective['operation']}: {collective['kind']} among unplanned {ranks}"
                    )
    return differences + differences_between_ranks(issued)


def differences_between_ranks(issued: Mapping[int, Sequence[Issued]]) -> list[str]:
    """Sentences on collectives of which ranks of one group issue other kinds or sizes, or in another order."""
    pairs = combinations(sorted(issued), 2)
    return [difference for first, other in pairs for difference in _between(first, issued[first], other, issued[other])]


def _messages(rank: int, steps: Sequence[Any], collectives: Sequence[Issued], row_bytes: int) -> list[str]:
    """Messages between stages: kind, peers and bytes, in order; hops of rings are issued within passes."""
    planned = [
        (
            "send" if operation.kind is OperationKind.SEND else "receive",
            operation.ranks,
            operation.num_tokens * row_bytes,
        )
        for operation in steps
        if operation.kind in MESSAGES and operation.num_tokens
    ]
    sent = [
        (collective["kind"], tuple(collective["ranks"]), collective["num_bytes"])
        for collective in collectives
        if collective["kind"] in POINT_TO_POINT and not collective["operation"].startswith(PLACES)
    ]
    if planned == sent:
        return []
    number = next((k for k, pair in enumerate(zip(planned, sent)) if pair[0] != pair[1]), min(len(planned), len(sent)))
    asked, did = (messages[number] if number < len(messages) else "nothing" for messages in (planned, sent))
    return [f"rank {rank}: message {number} is {did}, planned is {asked}"]


def _reductions(
    plan: StepPlan, rank: int, steps: Sequence[Operation], collectives: Sequence[Issued], model: ModelSpec
) -> list[str]:
    """Reduce-scatters of gradients to shares: one of each unit of the stage in every backward, from the last unit on.

    Gradients are of one width, which is that of the first. Those of attention are among the others.
    """
    planned: list[tuple[tuple[int, ...], int]] = []
    for operation in steps:
        pipeline = plan.pipelines[operation.pipeline]
        if operation.kind is OperationKind.BACKWARD and (degree := pipeline.scheme.degree) > 1:
            stage = next(s for s in range(pipeline.scheme.num_stages) if rank in pipeline.ranks_of(s))
            sizes = stage_unit_sizes(model, pipeline.scheme, stage) if pipeline.scheme.shard_gradients else []
            planned += [(operation.ranks, degree * shard_size(size, degree)) for size in reversed(sizes)]
    left = [
        (tuple(collective["ranks"]), collective["num_bytes"])
        for collective in collectives
        if collective["kind"] in REDUCTIONS
    ]
    width = next((num_bytes // planned[0][1] for ranks, num_bytes in left if planned and ranks == planned[0][0]), 0)
    issued = iter(left)
    for number, (ranks, size) in enumerate(planned):
        if not any(collective == (ranks, width * size) for collective in issued):
            words = f"reduce-scatter {number} of gradients, of {size:,} numbers among {ranks[:8]}"
            return [f"rank {rank}: {words} is planned and was not issued in its turn"]
    return []


def _between(first: int, of_first: Sequence[Issued], other: int, of_other: Sequence[Issued]) -> list[str]:
    """Collectives of every group that two ranks share: the same kinds and sizes in the same order."""
    differences = []
    shared = {tuple(c["ranks"]) for c in of_first} & {tuple(c["ranks"]) for c in of_other}
    for ranks in sorted(shared):
        sides = [
            [
                (c["kind"], 0 if c["kind"] in UNEQUAL else c["num_bytes"])
                for c in collectives
                if tuple(c["ranks"]) == ranks and c["kind"] not in POINT_TO_POINT
            ]
            for collectives in (of_first, of_other)
        ]
        if sides[0] != sides[1]:
            number = next((k for k, pair in enumerate(zip(*sides)) if pair[0] != pair[1]), min(map(len, sides)))
            a, b = (side[number] if number < len(side) else "nothing" for side in sides)
            differences.append(f"collective {number} of ranks {ranks[:8]}: rank {first} issues {a}, rank {other} {b}")
    return differences
