"""Totals over a step: of its targets, and of the columns that losses are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from lengthwise.core.errors import InputError
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.loop.planned_pipelines import make_shard
from lengthwise.runtime.loop.run_state import RunState


@dataclass(frozen=True)
class ColumnTotals:
    """The sums of each column over the tokens of a step, and of its first value over the sequences."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def of(self, column: str, over: Literal["tokens", "sequences"]) -> float:
        """One of the sums.

        Raises:
            InputError: there is no such column.
        """
        if column not in self.sums or over not in ("tokens", "sequences"):
            names = ", ".join(self.sums) or "none"
            raise InputError(
                f"no total of {column!r} over {over!r} is known: totals are over 'tokens' or 'sequences', and columns "
                f"for the loss are: {names}; name them in prepare(..., loss_columns=...)"
            )
        return self.sums[column][over == "sequences"]


OwnMicroBatches = Sequence[tuple[int, int, Pipeline, PlannedMicroBatch]]
"""Pipeline number, micro-batch number, pipeline and micro-batch."""


def count_targets(step: int, own: OwnMicroBatches, run: RunState) -> int:
    """Count the targets of a step over all ranks; every rank calls this with its ``own`` micro-batches."""
    count = 0
    for _, _, pipeline, planned in own:
        if run.world.rank == min(pipeline.ranks):
            shard = make_shard(run, step, pipeline, planned, is_alone=True)
            count += run.make(shard, planned.pack).num_targets
    return int(sum_over_ranks(torch.tensor(count, device=run.world.device)))


def column_totals(own: OwnMicroBatches, run: RunState) -> ColumnTotals:
    """Sum the columns for the loss over a step; every rank calls this with its ``own`` micro-batches."""
    columns = run.collator.loss_columns
    if not columns:
        return ColumnTotals()
    sums = torch.zeros(len(columns), 2, dtype=torch.float64)
    packs = [planned.pack for _, _, pipeline, planned in own if run.world.rank == min(pipeline.ranks)]
    for number, values_of in enumerate(columns.values()):
        for values in (values_of(sequence) for pack in packs for sequence in run.collator.members(pack)):
            sums[number] += torch.tensor([values.sum(), values[0].sum()], dtype=torch.float64)
    by_column = sum_over_ranks(sums.to(run.world.device)).tolist()
    return ColumnTotals({name: (total, of_sequences) for name, (total, of_sequences) in zip(columns, by_column)})
