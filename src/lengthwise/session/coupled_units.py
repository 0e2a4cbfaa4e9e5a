"""Runs whose loss couples sequences: members of units as sequences of their own, and which forwards keep graphs."""

from functools import partial
from math import ceil
from typing import Any

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.plan.kept_forwards import kept_forwards
from lengthwise.runtime.loop.coupled_values import Coupling, sizes_problem
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.unit_members import Units


class MembersApart:
    """A stream of batches of units, as batches of their members; a ``BatchStream``."""

    def __init__(self, stream: BatchStream, units: Units) -> None:
        self._stream, self._units = stream, units

    def __next__(self) -> GlobalBatch:
        batch = next(self._stream)
        numbers = self._units.ids(batch.ids)
        lengths = self._units.lengths[numbers].tolist()
        return GlobalBatch(step=batch.step, ids=tuple(numbers), lengths=tuple(lengths), objective=batch.objective)

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream of units."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the stream of units."""
        self._stream.load_state_dict(state)


def planned_stream(stream: BatchStream, prepared: PreparedModel, lengths: LengthIndex) -> tuple[BatchStream, int]:
    """The stream of what is planned, and the longest of it; ``lengths``: of single sequences or of whole units."""
    units = prepared.collator.units
    if units is None or not units.are_split:
        return stream, lengths.max_length
    return MembersApart(stream, units), int(units.lengths.max())


def with_members_planned(
    options: PrepareOptions, prepared: PreparedModel, lengths: LengthIndex
) -> tuple[PrepareOptions, LengthIndex]:
    """Options and lengths to plan with: where units are split, budgets count members and lengths are theirs."""
    units = prepared.collator.units
    if units is None or not units.are_split:
        return options, lengths
    if options.sequences_per_step is not None:
        count = ceil(options.sequences_per_step * len(units.lengths) / (len(units.offsets) - 1))
        options = options.model_copy(update={"sequences_per_step": count})
    if options.step_max_length is None:
        options = options.model_copy(update={"step_max_length": int(units.lengths.max())})
    return options.model_copy(update={"metric": None}), LengthIndex(lengths=units.lengths)


def check_can_couple(prepared: PreparedModel, options: PrepareOptions) -> None:
    """Raise ``InputError`` if the run's sequences cannot be coupled by a loss of the whole step."""
    if options.coupled_loss is None:
        return
    units, problem = prepared.collator.units, ""
    if isinstance(prepared.state, Fsdp2State):
        problem = f"FSDP2 shards {type(prepared.model).__name__}, whose forwards are each followed by their backward"
    elif options.form_batches and units is not None and units.are_split:
        problem = "form_batches=True forms batches of whole units, and their members are planned one by one"
    if problem:
        raise InputError(f"coupled_loss=: {problem}; leave one of the two out")
    if problem := sizes_problem(options.coupled_loss, units):
        raise InputError(problem)


def coupling_of(options: PrepareOptions, memory_bytes: int) -> Coupling | None:
    """How steps couple their sequences on devices of ``memory_bytes``; None: they do not."""
    if options.coupled_loss is None:
        return None
    keep_forwards = partial(kept_forwards, memory_bytes=memory_bytes)
    return Coupling(loss_of=options.coupled_loss, keep_forwards=keep_forwards)
