"""Forwards of planned micro-batches without a backward: for validation, and for what a model says of sequences."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.cut_plan import CutPlan
from lengthwise.core.errors import InfeasibleError, InputError, LengthwiseError
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.brought_items import BroughtBatch, ItemExchange, exchange
from lengthwise.runtime.loop.call_order import all_succeed
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.planned_pipelines import in_one_piece, make_shard, micro_batches_of, own_rounds
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.staged_pipeline import StagedPipeline
from lengthwise.runtime.state.layer_gather import LayerGather
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.wrap.collator import pad_to_degree
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.sequence_sums import end_sums, num_sequences
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from lengthwise.runtime.wrap.zero_collectives import finish_forwards

Per = Literal["token", "sequence"]
ValuesOf = Callable[[Any, MicroBatch], Tensor]
Look = Callable[[MicroBatch, Any, bool], None]


class ScoringRun(Protocol):
    """A run, as far as scores of items need it."""

    wrapped_model: WrappedModel
    world: DistContext
    state: ShardedState | Fsdp2State
    seed: int

    @property
    def usual_scripts(self) -> tuple[ExchangeScript, ...]:
        """The collectives of the forwards of a micro-batch, as loops usually call them; () if not known."""
        ...

    @property
    def items(self) -> ItemExchange:
        """Sends items to the ranks that compute them."""
        ...

    def begin_plan(self, plan: StepPlan) -> None:
        """Make the groups of a plan."""
        ...


def forwards(
    begin_plan: Callable[[StepPlan], None],
    prepared: PreparedModel,
    plan: StepPlan,
    look: Look,
    *,
    usual_scripts: tuple[ExchangeScript, ...] = (),
    what: str,
    way_out: str,
) -> None:
    """Run the forwards of this rank's micro-batches of a plan, without noise; ``look`` is called with each.

    A rank that fails, by ``look`` or for want of memory, goes through the rest of the plan and sends zeros, so that no
    other rank hangs. Every rank calls this, under ``torch.no_grad()``.

    Args:
        begin_plan: makes the groups of the plan.
        prepared: the model.
        plan: what is computed where.
        look: takes the micro-batch, the output of its forward, and whether that is of the whole model; it is not on
            stages of a pipeline but the last. The micro-batch is active.
        usual_scripts: the exchanges of a micro-batch with which a rank stands in for itself before it has seen one.
        what: that is computed, and ``way_out`` of too little memory, for messages.

    Raises:
        InfeasibleError: a rank ran out of memory.
        InputError: ``look`` failed on a rank.
    """
    gather, plan = prepared.gather, in_one_piece(plan)
    begin_plan(plan)
    rounds = [] if gather is None else own_rounds(plan, prepared.world.rank)
    failure, scripts = None, usual_scripts
    own_batches = micro_batches_of(plan, prepared.world.rank, prepared.collator)
    for position, (_, index, pipeline, planned, _) in enumerate(own_batches):
        shard = make_shard(prepared, plan.step, pipeline, planned)
        shard.has_noise, shard.has_failed = False, failure is not None
        if gather is not None:
            gather.begin_round(rounds[position])
            if failure is not None:
                gather.abandon_round()
        stage = StagedPipeline(prepared, pipeline) if pipeline.scheme.num_stages > 1 else None
        if stage is not None:
            stage.attach(shard, index)
        error = _run_forward(prepared, shard, planned, look)
        if error is None and shard.has_failed and failure is None:
            error = _shortage(what, planned.pack.num_tokens, way_out)
        failure = failure or error
        if error is None:
            scripts = tuple(forward.script for forward in shard.passes)
        else:
            _stand_in(shard, scripts, gather, error)
        end_sums(shard, has_left=error is not None)
        if stage is not None:
            stage.end_forward(shard, index)
            stage.wait()
    if gather is not None:
        gather.finish_rounds()  # as a step does: gradients, which are zero, are sent as well
        prepared.update_weights()
        prepared.state.clear_gradient()
    all_succeed(prepared.world, lambda: _raise(failure))


def _run_forward(prepared: PreparedModel, shard: PackShard, planned: PlannedMicroBatch, look: Look) -> Exception | None:
    """Run the forward of one micro-batch and look at it; returned is what failed, if it is not memory."""
    with active(shard):
        micro_batch = prepared.make(shard, pad_to_degree(planned.pack, shard.group.size, prepared.collator))
        try:
            output = prepared.model(**micro_batch.inputs)
            look(micro_batch, output, shard.stage_pass is None or shard.stage_pass.is_last)
        except LengthwiseError as error:
            return error
        except Exception as error:  # of the user's own model, or of what looks at its output
            problem = InputError(f"{type(error).__name__}: {error}")
            problem.__cause__ = error
            return problem
    return None


def _shortage(what: str, num_tokens: int, way_out: str) -> InfeasibleError:
    message = f"{what} ran out of memory with {num_tokens:,} tokens; {way_out}"
    return InfeasibleError(message, what=f"a micro-batch of {what}", value=num_tokens, unit="tokens")


def _stand_in(
    shard: PackShard, scripts: tuple[ExchangeScript, ...], gather: LayerGather | None, error: Exception
) -> None:
    """Send zeros for what is left of a forward that failed; raise ``error`` if what others wait for is not known."""
    if not scripts and shard.group.size > 1:
        raise error
    shard.has_failed = True
    finish_forwards(shard, scripts)
    if gather is not None:
        gather.abandon_round()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


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
                for sequence, value in zip(micro_batch.numbers, array):
                    self._parcel(sequence)["value"] = value
            return
        for sequence, (_, places, positions) in zip(micro_batch.numbers, micro_batch.own_slots()):
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
        InputError: ``values_of`` failed on a rank, or values have another shape than one for each token or sequence.
        InfeasibleError: a rank ran out of memory.
    """
    scorer = PreparedModel(
        run.wrapped_model, run.world, collator=run.items.collator(brought, cut), state=run.state, seed=run.seed
    )
    scores = ItemScores(run.world, brought, per)

    def look(micro_batch: MicroBatch, output: Any, is_whole: bool) -> None:
        values = values_of(output, micro_batch)
        if is_whole and not micro_batch.shard.has_failed:
            scores.add(micro_batch, values)

    forwards(
        run.begin_plan, scorer, cut.plan, look, usual_scripts=run.usual_scripts, what="scoring",
        way_out="give fewer or shorter items",
    )  # fmt: skip
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
