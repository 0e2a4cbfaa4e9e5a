"""Runs whose loss couples sequences: members of units as sequences of their own, and which forwards keep graphs."""

from functools import partial
from math import ceil
from typing import Any

import numpy as np

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.cut_plan import CutPlan, PlanWithCuts
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.plan.cut_units import plan_with_cuts
from lengthwise.plan.kept_forwards import kept_forwards
from lengthwise.plan.planner import Planner
from lengthwise.runtime.loop.brought_items import PlanUnits
from lengthwise.runtime.loop.coupled_values import Coupling, sizes_problem
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.session.prepare_planning import make_planner
from lengthwise.session.run_planner import ForwardPlanner


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


def cuts_of(options: PrepareOptions) -> PlanWithCuts | None:
    """What plans batches whose units may be cut in parts; None: units stay whole."""
    is_asked_for = options.coupled_loss is not None if options.cut_units is None else options.cut_units
    return plan_with_cuts if options.share_prefixes and is_asked_for else None


def planned_by(planner: ForwardPlanner, plan_units: PlanWithCuts | None) -> PlanUnits:
    """A planner of units, which ``plan_units`` cuts; None: which stay whole."""
    if plan_units is not None:
        return partial(plan_units, planner)
    return lambda batch, tree_of: CutPlan(plan=planner(batch), batch=batch)


def planner_that_cuts(
    units: Units | None, options: PrepareOptions, cost: CostModel, *, lengths: LengthIndex, **settings: Any
) -> Planner:
    """The planner of the policy; where ``units`` may be cut, for what is left of those that do not fit whole.

    Raises:
        InfeasibleError: the model's state or the longest sequence fits under no scheme.
    """
    try:
        return make_planner(options, cost, lengths=lengths, **settings)
    except InfeasibleError as error:
        if units is None or error.limit is None or error.unit != "tokens" or units.lengths.max() > error.limit:
            raise
        reach = int(error.limit)
    of_parts = LengthIndex(lengths=np.minimum(lengths.lengths, reach))
    return make_planner(options, cost, lengths=of_parts, **settings)


def check_can_couple(prepared: PreparedModel, options: PrepareOptions) -> None:
    """Raise ``InputError`` if the run's sequences cannot be coupled by a loss of the whole step, or units be cut."""
    if options.cut_units and not options.share_prefixes:
        raise InputError(
            "cut_units=True cuts units whose sequences share prefixes; set share_prefixes=True, or leave cut_units out"
        )
    if options.coupled_loss is None:
        return
    units = prepared.collator.units
    if options.form_batches and units is not None and units.are_split:
        raise InputError(
            "coupled_loss=: form_batches=True forms batches of whole units, and their members are planned one by one; "
            "leave one of the two out"
        )
    if problem := sizes_problem(options.coupled_loss, units):
        raise InputError(problem)


def coupling_of(options: PrepareOptions, memory_bytes: int) -> Coupling | None:
    """How steps couple their sequences on devices of ``memory_bytes``; None: they do not."""
    if options.coupled_loss is None:
        return None
    keep_forwards = partial(kept_forwards, memory_bytes=memory_bytes)
    return Coupling(loss_of=options.coupled_loss, keep_forwards=keep_forwards)
