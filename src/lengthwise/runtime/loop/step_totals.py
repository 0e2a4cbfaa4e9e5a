"""Totals over a step: of its targets, and of the columns that losses are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.loop.planned_pipelines import LoopMicroBatch, make_shard
from lengthwise.runtime.loop.run_state import RunState
from lengthwise.runtime.wrap.context import active


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


def count_targets(step: int, own: Sequence[LoopMicroBatch], run: RunState) -> int:
    """Count the targets of a step over all ranks; every rank calls this with its ``own`` micro-batches."""
    count = 0
    for micro_batch in _counted(own, run.world.rank):
        shard = make_shard(run, step, micro_batch.pipeline, micro_batch.planned, is_alone=True)
        with active(shard):
            count += run.wrapped_model.targets_of(run.make(shard, micro_batch.planned.pack))
    return int(sum_over_ranks(torch.tensor(count, device=run.world.device)))


def _counted(own: Sequence[LoopMicroBatch], rank: int) -> list[LoopMicroBatch]:
    """The micro-batches of which this rank counts what is in their packs, each once."""
    return [batch for batch in own if batch.is_first_of_pack and rank == min(batch.pipeline.ranks)]


def column_totals(own: Sequence[LoopMicroBatch], run: RunState) -> ColumnTotals:
    """Sum the columns for the loss over a step; every rank calls this with its ``own`` micro-batches."""
    columns = run.collator.loss_columns
    if not columns:
        return ColumnTotals()
    sums = torch.zeros(len(columns), 2, dtype=torch.float64)
    packs = [micro_batch.planned.pack for micro_batch in _counted(own, run.world.rank)]
    for number, values_of in enumerate(columns.values()):
        for values in (values_of(sequence) for pack in packs for sequence in run.collator.members(pack)):
            sums[number] += torch.tensor([part.sum(dtype=np.float64) for part in (values, values[0])])
    by_column = sum_over_ranks(sums.to(run.world.device)).tolist()
    return ColumnTotals({name: (total, of_sequences) for name, (total, of_sequences) in zip(columns, by_column)})
