"""Forwards of planned micro-batches without a backward: for validation, and for what a model says of sequences."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.cut_plan import CutPlan
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.brought_items import BroughtBatch, ItemExchange, exchange
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.planned_pipelines import make_shard, micro_batches_of, own_rounds
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.staged_pipeline import StagedPipeline
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.wrap.collator import pad_to_degree
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.sequence_sums import num_sequences
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

Per = Literal["token", "sequence"]
ValuesOf = Callable[[Any, MicroBatch], Tensor]


class ScoringRun(Protocol):
    """A run, as far as scores of items need it."""

    wrapped_model: WrappedModel
    world: DistContext
    state: ShardedState | Fsdp2State
    seed: int

    @property
    def items(self) -> ItemExchange:
        """Sends items to the ranks that compute them."""
        ...

    def begin_plan(self, plan: StepPlan) -> None:
        """Make the groups of a plan."""
        ...


def forwards(
    begin_plan: Callable[[StepPlan], None], prepared: PreparedModel, plan: StepPlan, *, what: str, way_out: str
) -> Iterator[tuple[MicroBatch, Any, bool]]:
    """This rank's micro-batches of a plan, without noise, the outputs of their forwards, and whether they are whole.

    On stages of a pipeline but the last, an output is none of the whole model. While one is looked at its micro-batch
    is active. Every rank calls this, under ``torch.no_grad()``.

    Raises:
        InfeasibleError: this rank ran out of memory; ``what`` and ``way_out`` are for its message.
    """
    gather, model = prepared.gather, prepared.model
    begin_plan(plan)
    rounds = [] if gather is None else own_rounds(plan, prepared.world.rank)
    own_batches = micro_batches_of(plan, prepared.world.rank, prepared.collator)
    for position, (_, index, pipeline, planned) in enumerate(own_batches):
        if gather is not None:
            gather.begin_round(rounds[position])
        shard = make_shard(prepared, plan.step, pipeline, planned)
        shard.has_noise = False
        stage = StagedPipeline(prepared, pipeline) if pipeline.scheme.num_stages > 1 else None
        if stage is not None:
            stage.attach(shard, index)
        with active(shard):
            pack = pad_to_degree(planned.pack, shard.group.size, prepared.collator)
            micro_batch = prepared.make(shard, pack)
            output = model(**micro_batch.inputs)
            yield micro_batch, output, shard.stage_pass is None or shard.stage_pass.is_last
        if stage is not None:
            stage.end_forward(shard, index)
            stage.wait()
        if shard.has_failed:
            raise InfeasibleError(
                f"{what} ran out of memory with {planned.pack.num_tokens:,} tokens; {way_out}",
                what=f"a micro-batch of {what}", value=planned.pack.num_tokens, unit="tokens",
            )  # fmt: skip
    if gather is not None:
        gather.finish_rounds()  # as a step does: gradients, which are zero, are sent as well
        prepared.update_weights()
        prepared.state.clear_gradient()


class ItemScores:
    """What a model says of sequences, on the ranks that computed it, and then on those that brought the sequences."""

    def __init__(self, world: DistContext, brought: BroughtBatch, per: Per) -> None:
        """``per``: whether there is a value for each token or for each sequence."""
        if per not in ("token", "sequence"):
            raise InputError(f"scores are per 'token' or 'sequence', not per {per!r}")
        self._world, self._brought, self._per = world, brought, per
        self._parcels: list[dict[int, dict[str, np.ndarray]]] = [{} for _ in range(world.size)]

    def add(self, micro_batch: MicroBatch, values: Any) -> None:
        """Keep the values of a micro-batch: [t, ...] or [1, t, ...] of this rank's slots, or [s, ...] of sequences.

        Raises:
            InputError: they have another shape.
        """
        shard = micro_batch.shard
        count = shard.num_slots if self._per == "token" else num_sequences(shard)
        if isinstance(values, Tensor) and self._per == "token" and tuple(values.shape[:2]) == (1, count):
            values = values[0]
        if not isinstance(values, Tensor) or not values.dim() or len(values) != count:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(f"scores per {self._per} are a tensor of {count} here, [{count}, ...]; got {shape}")
        array = _as_array(values)
        if self._per == "sequence":
            if shard.group.rank == 0:
                for sequence, value in zip(micro_batch.sequence_ids, array):
                    self._parcel(sequence)["value"] = value
            return
        for sequence, places, positions in micro_batch.own_slots():
            if len(places):
                self._parcel(sequence)[f"positions{shard.group.rank}"] = positions
                self._parcel(sequence)[f"values{shard.group.rank}"] = array[places]

    def _parcel(self, sequence: int) -> dict[str, np.ndarray]:
        owner = self._brought.owner(sequence)
        return self._parcels[owner].setdefault(sequence, {})

    def of_items(self) -> list[Any]:
        """The scores of this rank's items: arrays [length, ...] or values; of units, a list for the members.

        Every rank calls this.
        """
        received, brought = exchange(self._world, self._parcels), self._brought
        items = range(brought.first, brought.first + brought.counts[self._world.rank])
        values = [[_joined(received[sequence]) for sequence in brought.units.ids([item])] for item in items]
        return values if brought.has_units else [of_item for (of_item,) in values]


@torch.no_grad()
def score_items(run: "ScoringRun", brought: BroughtBatch, cut: CutPlan, per: Per, values_of: ValuesOf) -> list[Any]:
    """What ``values_of`` says of this rank's items, computed by the ranks of a plan; every rank calls this.

    Raises:
        InputError: values have another shape than one for each token, or for each sequence.
        InfeasibleError: a rank ran out of memory.
    """
    scorer = PreparedModel(
        run.wrapped_model, run.world, collator=run.items.collator(brought, cut), state=run.state, seed=run.seed
    )
    scores = ItemScores(run.world, brought, per)
    for micro_batch, output, is_last in forwards(
        run.begin_plan, scorer, cut.plan, what="scoring", way_out="give fewer or shorter items"
    ):
        values = values_of(output, micro_batch)
        if is_last:
            scores.add(micro_batch, values)
    return scores.of_items()


def _joined(columns: Any) -> np.ndarray:
    """The scores of one sequence, of what ranks computed of it."""
    if "value" in columns:
        return np.asarray(columns["value"])
    ranks = [name.removeprefix("positions") for name in columns if name.startswith("positions")]
    positions = np.concatenate([columns[f"positions{rank}"] for rank in ranks])
    values = np.concatenate([columns[f"values{rank}"] for rank in ranks])
    return np.asarray(values[np.argsort(positions, kind="stable")])


def _as_array(values: Tensor) -> np.ndarray:
    detached = values.detach()
    return (detached.float() if detached.dtype == torch.bfloat16 else detached).cpu().numpy()
