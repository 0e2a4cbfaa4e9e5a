"""What a prepared run does where its longest sequence does not fit. Without recompute: recomputed layers may keep what
attention gave. With every layer recomputed: feed-forwards compute tiles, as plans say, and the optimizer's state goes
to host memory; where that does not do either, attention computes groups of heads. Nothing of it is looked at where the
sequence fits.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.layer_profile import LayerVariant
from lengthwise.core.pipeline_config import Method
from lengthwise.cost.analytic.heads import split_heads
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.memory_ladder import PAYS, TILE_TOKENS
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.two_layer_profile import measure_update
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.verify.compute_settings import RECOMPUTE
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.verify.trace import trace_tiles
from lengthwise.runtime.wrap.exchange_script import AttentionExchange
from lengthwise.session.calibration import measured_rows, with_rows

_log = logging.getLogger("lengthwise")

MOST_HEAD_GROUPS = 16
"""Groups of heads at most: with as many, what one has is little beside queries, keys and values of all heads."""
FEWEST_TILES = 16
"""Tiles of the longest sequence on each rank that shares it, at least."""


def with_longest_fitting(
    prepared: PreparedModel,
    options: PrepareOptions,
    cost: CostModel,
    longest: int,
    plan_with: Callable[[CostModel], Planner],
) -> CostModel:
    """The costs of kept attention, tiles and a state in host memory too, where a sequence of ``longest`` tokens needs
    them.

    Every rank calls this. ``plan_with``: makes the planner under a cost model.

    Raises:
        CheckError: gradients differ in tiles.
        InfeasibleError: the sequence fits nowhere.
    """
    if not isinstance(cost, DualLayerCost):
        return cost
    cost = _with_kept_attention(prepared, options, cost, longest)
    if cost.holds(longest):
        return cost
    cost = _with_head_groups(prepared, options, _with_tiles(prepared, options, cost), plan_with)
    return _with_state_placed(prepared, options, cost, longest, plan_with)


def _with_kept_attention(
    prepared: PreparedModel, options: PrepareOptions, cost: DualLayerCost, longest: int
) -> DualLayerCost:
    """The costs of layers that are recomputed but for their attention too, if the longest sequence needs recompute and
    attention is enough of that to pay; the model is compared with the stock model so, and measured.
    """
    may_keep = options.recompute == "auto" and not options.compile and prepared.wrapped_model.by_sequence is None
    if not may_keep or cost.holds(longest, recompute=False) or not _attention_pays(cost, longest):
        return cost
    if options.check:
        most_degree = max(degree for degree, _ in cost.fits)
        degrees = sorted({1, most_degree})
        check_exact(prepared, degrees=degrees, methods=options.sharing_methods, recompute=("selective",))
    prepared.wrapped_model.layers.may_keep_attention = True
    if cost.table.keeps_attention:  # measured in an earlier run
        return cost
    rows = measured_rows(prepared, cost.table, list(cost.fits), LayerVariant(keep_attention=True))
    if all(row.kept_bytes <= 1 for row in rows):
        _log.debug("plans keep no attention: layers launch no kernel of attention that is known")
        return cost
    return with_rows(prepared, options, cost, rows)


def _attention_pays(cost: DualLayerCost, longest: int) -> bool:
    """Whether what grows with the square of a length is enough of a recomputed layer's time to be worth keeping."""
    for fit in cost.fits.values():
        forward_s, backward_s = (float(c.of_sequences(np.array(longest))) for c in (fit.forward, fit.backward))
        if fit.forward.a_s * longest**2 > PAYS * (2 * forward_s + backward_s):
            return True
    return False


def _with_tiles(prepared: PreparedModel, options: PrepareOptions, cost: DualLayerCost) -> DualLayerCost:
    """The costs of tiles too, if modules are found that map each token by itself; these are compared with the stock
    model in tiles, and measured in them.
    """
    may_compute_tiles = options.feed_forward_tile is None and not options.compile and options.recompute != "none"
    is_in_packs = prepared.wrapped_model.by_sequence is None
    if not may_compute_tiles or not is_in_packs:
        return cost
    most_degree = max(degree for degree, _ in cost.fits)
    slots = cost.table.longest // prepared.collator.slot_tokens // most_degree // FEWEST_TILES
    tile_tokens = cost.tile_tokens or min(TILE_TOKENS, slots)
    if not tile_tokens:
        return cost
    if problem := trace_tiles(prepared):
        _log.debug("plans have no tiles: %s", problem)
        return cost
    if options.check:
        recompute = ("all",) if options.recompute == "all" else RECOMPUTE[1:]
        degrees = sorted({1, most_degree})
        check_exact(prepared, degrees=degrees, methods=options.sharing_methods, recompute=recompute)
    if cost.tile_tokens:  # measured in an earlier run
        return cost
    rows = measured_rows(prepared, cost.table, list(cost.fits), LayerVariant(tile_tokens=tile_tokens))
    return with_rows(prepared, options, cost, rows)


def _with_head_groups(
    prepared: PreparedModel, options: PrepareOptions, cost: DualLayerCost, plan_with: Callable[[CostModel], Planner]
) -> DualLayerCost:
    """The costs of attention in groups of heads too, at the highest degree of Ulysses and in tiles if there are any,
    where the longest sequence fits under no plan without; the model is compared with the stock model so, and measured.
    """
    degree = max((degree for degree, method in cost.fits if method is Method.ULYSSES), default=1)
    count = _num_head_groups(prepared, degree)
    may_have_groups = count > 1 and not options.compile and prepared.wrapped_model.by_sequence is None
    if not may_have_groups:
        return cost
    at_once = cost.with_table(replace(cost.table, rows=tuple(row for row in cost.table.rows if row.head_groups == 1)))
    on_host = [at_once.with_state_on_host()] if _may_move_state(prepared, options, cost) else []
    if any(_is_plannable(plan_with, placed) for placed in (at_once, *on_host)):
        return cost
    if options.check:
        recompute = (options.recompute,) if options.recompute in ("none", "all") else RECOMPUTE
        check_exact(prepared, degrees=[degree], methods=(Method.ULYSSES,), recompute=recompute, head_groups=count)
    variant = LayerVariant(tile_tokens=cost.tile_tokens, head_groups=count)
    if variant in cost.table.variants:  # measured in an earlier run
        return cost
    rows = measured_rows(prepared, cost.table, [(degree, Method.ULYSSES)], variant)
    return with_rows(prepared, options, cost, rows)


def _num_head_groups(prepared: PreparedModel, degree: int) -> int:
    """Into how many groups to cut the heads of each of ``degree`` ranks: by key/value heads, or one by one; 1: none.

    One rank alone keeps as much in groups as without.
    """
    if degree == 1:
        return 1
    calls = [call for call in prepared.wrapped_model.script.calls.values() if isinstance(call, AttentionExchange)]
    splits = [split_heads(call.num_heads, call.num_kv_heads, degree=degree) for call in calls]
    counts = [split.num_kv_heads if split.num_kv_heads > 1 else split.num_heads for split in splits]
    return min(MOST_HEAD_GROUPS, max(counts, default=1))


def _is_plannable(plan_with: Callable[[CostModel], Planner], cost: CostModel) -> bool:
    """Whether there are plans for all sequences under ``cost``."""
    try:
        plan_with(cost)
    except InfeasibleError:
        return False
    return True


def _may_move_state(prepared: PreparedModel, options: PrepareOptions, cost: DualLayerCost) -> bool:
    """Whether the optimizer's state may go to host memory, and is not there yet."""
    has_host = isinstance(prepared.state, ShardedState) and cost.cluster.device.host_bytes_per_s > 0
    return options.offload_state == "auto" and not cost.state_on_host and has_host


def _with_state_placed(
    prepared: PreparedModel,
    options: PrepareOptions,
    cost: DualLayerCost,
    longest: int,
    plan_with: Callable[[CostModel], Planner],
) -> DualLayerCost:
    """The costs, with the state in host memory where the longest sequence fits under no plan otherwise."""
    if not _may_move_state(prepared, options, cost) or _is_plannable(plan_with, cost):
        return cost
    on_host = cost.with_state_on_host()
    plan_with(on_host)
    if prepared.world.is_first:
        _log.info(
            "the longest sequence (%s tokens) does not fit beside the optimizer's state, which goes to host memory",
            f"{longest:,}",
        )
    prepared.move_state_to_host()
    return on_host.with_table(replace(on_host.table, update_s=measure_update(prepared)))
