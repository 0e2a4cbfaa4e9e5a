"""Whether the plans of a prepared model may split backwards: what is compared and measured before they do."""

import logging
from dataclasses import replace

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.layer_profile import SPLIT_BACKWARD
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.two_layer_profile import ProfilingEffort
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.session.calibration import measured_rows, with_rows

_log = logging.getLogger("lengthwise")
EFFORT = ProfilingEffort(repeats=3, budget_s=5.0)
"""Of measuring what split backwards leave for later, beside what was measured of whole ones."""


def with_split_backwards(
    prepared: PreparedModel, options: PrepareOptions, cost: CostModel, max_stages: int | None
) -> CostModel:
    """The costs of split backwards too, where plans of up to ``max_stages`` may have them, or without.

    The model is compared with itself in stages of one layer each that split their backwards, and two of its layers are
    measured so. Every rank calls this.

    Raises:
        InputError: all backwards are to be split, and those of this run cannot be.
        CheckError: the same, as gradients differ then.
    """
    problem = prepared.split_problem
    if options.zero_bubble == "none" or max_stages == 1:
        return _without(cost)
    if problem and options.zero_bubble == "all":
        raise InputError(f"zero_bubble='all', and {problem}; leave one of the two out")
    if problem:
        return _without(cost)
    if prepared.is_cuttable:  # and else a run compares the stages that a plan has
        try:
            check_stages(prepared, (1,) * prepared.wrapped_model.structure.num_layers, splits=True)
        except LengthwiseError as error:
            if options.zero_bubble == "all":
                raise
            _log.debug("backwards of stages are whole: %s", error)
            return _without(cost)
        prepared.wrapped_model.layers.may_split = True
    if not isinstance(cost, DualLayerCost) or cost.prices_split_backwards:
        return cost
    rows = measured_rows(prepared, cost.table, [min(cost.fits)], SPLIT_BACKWARD, EFFORT)
    return with_rows(prepared, options, cost, rows)


def _without(cost: CostModel) -> CostModel:
    """The costs, without those of split backwards that an earlier run measured."""
    if not isinstance(cost, DualLayerCost) or not cost.prices_split_backwards:
        return cost
    return cost.with_table(replace(cost.table, rows=tuple(row for row in cost.table.rows if not row.split_backward)))
