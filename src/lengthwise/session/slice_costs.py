"""Whether plans of a prepared model may cut micro-batches into slices: what is compared and priced before they do."""

import logging

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import LengthwiseError
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.slice_limits import attention_sizes, slice_problem
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.session.zero_bubble_costs import with_split_backwards

_log = logging.getLogger("lengthwise")


def with_passes_priced(
    prepared: PreparedModel, options: PrepareOptions, cost: CostModel, max_stages: int | None
) -> tuple[PrepareOptions, CostModel]:
    """The options and the costs of a run whose stages may split backwards and compute slices, as far as they can.

    Every rank calls this.

    Raises:
        InputError: all backwards are to be split, and those of this run cannot be.
        CheckError: the same, as gradients differ then.
    """
    return _with_slices(prepared, options, with_split_backwards(prepared, options, cost, max_stages), max_stages)


def _with_slices(
    prepared: PreparedModel, options: PrepareOptions, cost: CostModel, max_stages: int | None
) -> tuple[PrepareOptions, CostModel]:
    """The options and the costs of a run whose plans, of up to ``max_stages``, may have slices, or whose may not.

    The model is compared with itself where a pack is computed in slices: by all layers, or where these are gathered, by
    stages of one layer each.
    """
    if options.slices == "none" or max_stages == 1:
        return options.model_copy(update={"slices": "none"}), cost
    problem = slice_problem(prepared, is_coupled=options.coupled_loss is not None)
    if not problem:
        try:
            num_layers = prepared.wrapped_model.structure.num_layers
            check_stages(prepared, (num_layers,) if prepared.gather is None else (1,) * num_layers, slices=True)
        except LengthwiseError as error:
            problem = str(error).partition("; plan with")[0]
    if problem:
        if prepared.world.is_first:
            name = type(prepared.model).__name__
            _log.info("micro-batches of %s are not cut into slices: %s", name, problem)
        return options.model_copy(update={"slices": "none"}), cost
    prepared.wrapped_model.layers.may_slice = True
    if isinstance(cost, DualLayerCost):
        cost = cost.with_attention(attention_sizes(prepared.wrapped_model.script))
    return options, cost
