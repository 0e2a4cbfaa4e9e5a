"""Whether the ranks of a prepared run hold all weights or gather layers, and how many layers stay whole in a step."""

import logging
from collections.abc import Callable
from functools import partial

from torch import nn

from lengthwise.config.choices import ShardGradients
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.fsdp2 import fsdp_modules
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.session.objectives import labels_sequences

_log = logging.getLogger("lengthwise")

KeepLayers = Callable[[StepPlan], int]
"""From a plan to how many of the last layers every rank holds whole during its step."""


def place_weights(
    prepared: PreparedModel, options: PrepareOptions, cost: CostModel, longest: int
) -> tuple[CostModel, KeepLayers | None]:
    """The cost model of a run, and what its steps keep whole where weights are gathered by layer; None: all.

    Every rank calls this. Where the costs say that weights had better be gathered, they are from here on, and what is
    computed so is compared with the stock model as well. ``longest``: the tokens of the longest sequence.

    Raises:
        InputError: weights are to be gathered by layer, and this model's cannot.
        CheckError: gradients differ where they are.
    """
    if options.weights == "whole" or prepared.world.size == 1:
        return cost, None
    if options.weights == "by-layer":
        prepared.gather_by_layer()
    elif not isinstance(cost, DualLayerCost) or prepared.gather_problem or cost.holds(longest):
        return cost, None
    if not isinstance(cost, DualLayerCost):
        return cost, lambda plan: 0
    structure, used = prepared.wrapped_model.structure, prepared.wrapped_model.used_units
    gather = LayerGatherCost(
        unit_params=structure.table().unit_sizes,
        unit_frozen_bytes=structure.unit_frozen_bytes(),
        dtype=cost.table.identity.dtype,
        state_on_host=cost.state_on_host,
        narrow_gradients=cost.narrow_gradients,
        has_early_output=any(structure.num_layers + 1 in units for units in used[:-1]),
        head_units=tuple(sorted(used[-1])) if used else (),
    )
    if options.weights == "auto" and prepared.world.is_first:
        _log.info(
            "the longest sequence (%s tokens) does not fit beside all weights; each rank holds a share of them and "
            "gathers a layer when it computes", f"{longest:,}",
        )  # fmt: skip
    if prepared.gather is None:
        prepared.gather_by_layer()
        if options.check:
            size = prepared.world.size
            check_exact(prepared, degrees=sorted({1, min(size, options.max_degree or size)}))
    return cost.with_gather(gather), partial(gather.num_kept_in, cost.memory_limit_bytes)


def shared_gradients(prepared: PreparedModel, options: PrepareOptions, cost: CostModel) -> ShardGradients:
    """Where plans may shard gradients: as is asked for, but nowhere if each goes to its owner in every backward anyway.

    By themselves they do under costs alone that know that a step has one layout of gradients.

    Raises:
        InputError: all are to be sharded, and those of this run cannot be.
    """
    problems = {
        "FSDP2 shards the model": not isinstance(prepared.state, ShardedState),
        "coupled_loss= computes every micro-batch twice": options.coupled_loss is not None,
    }
    problem = next((problem for problem, applies in problems.items() if applies), "")
    if problem and options.shard_gradients == "all":
        raise InputError(f"shard_gradients='all', and {problem}; leave one of the two out")
    is_known = isinstance(cost, DualLayerCost) or options.shard_gradients == "all"
    return options.shard_gradients if is_known and not problem and prepared.gather is None else "none"


def with_weight_placement(
    model: nn.Module, options: PrepareOptions, world: DistContext, memory_bytes: float
) -> PrepareOptions:
    """The options with weights ``by-layer`` if all weights do not fit a device, and ``whole`` if there is one rank."""
    if world.size == 1:
        return options.model_copy(update={"weights": "whole"})
    needed = whole_bytes(model, world.size, narrow_gradients=options.optimizer_settings.narrow_gradients)
    is_by_sequence = options.packing == "never" or labels_sequences(model, options)
    if options.weights != "auto" or needed <= memory_bytes or is_by_sequence or fsdp_modules(model):
        return options
    if world.is_first:
        _log.info(
            "all weights and gradients of %s take %.1f GiB, a device has %.1f; each rank holds a share of them and "
            "gathers a layer when it computes", type(model).__name__, needed / 2**30, memory_bytes / 2**30,
        )  # fmt: skip
    return options.model_copy(update={"weights": "by-layer"})


def whole_bytes(model: nn.Module, num_ranks: int, *, narrow_gradients: bool = False) -> float:
    """Bytes on each rank of all weights and gradients, and of its share of master weights, sums and two moments."""
    total = 0.0
    for parameter in model.parameters():
        compute, master = parameter.element_size(), max(4, parameter.element_size())
        gradient = compute if narrow_gradients else master
        trained = gradient + (3 * master + gradient) / num_ranks if parameter.requires_grad else 0
        total += parameter.numel() * (compute + trained)
    return total
