"""Sharded gradients of a model of which two layers were measured: bytes, seconds, and what may follow in a step."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import LinkRow
from lengthwise.core.parameter_shapes import unit_size
from lengthwise.core.pipeline_config import Method, homogeneous, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.profiled.dual_layer import MIXED_S, DualLayerCost
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.plan.space.sharded_gradients import GradientSharding
from tests.cost.profiled.test_dual_layer import CLUSTER, LAYERS, PACKS, row, table

UNITS = (3_000, *(1_000,) * LAYERS, 500)
LINK = LinkRow(degree=2, latency_s=1e-4, bytes_per_s=1e6)
TABLE = table(links=(LINK,), num_params=sum(UNITS))
COST = DualLayerCost(TABLE, cluster=CLUSTER, unit_params=UNITS)


def schemes(degree=2, stages=1, **changes):
    """One with whole gradients, and one that shards them."""
    whole = uniform_scheme(LAYERS, degree=degree, stages=stages, method=Method.ULYSSES, **changes)
    return whole, replace(whole, shard_gradients=True)


def test_a_rank_keeps_a_share_and_two_units_whole():
    whole, sharded = schemes()
    more, fewer = (COST.peak_bytes(0, scheme, num_devices=4) for scheme in (whole, sharded))
    assert more - fewer == 4 * (sum(UNITS) // 2 - 1.5 * (UNITS[0] + UNITS[1]))
    rows = [row(lengths, degree) for degree in (1, 2) for lengths in PACKS]
    staged = DualLayerCost(table(rows, num_params=sum(UNITS)), cluster=CLUSTER, unit_params=UNITS)
    _, (_, gradients, _) = [staged.stage_state(64, schemes(stages=2)[1], s, num_devices=4)[0] for s in (0, 1)]
    assert gradients == 4 * (sum(UNITS) // 2 + 1.5 * 2 * 1_000)


def test_every_micro_batch_pays_for_reducing_over_the_measured_link():
    whole, sharded = schemes()
    reduction, num_units = COST.reduction(sharded), LAYERS + 2
    assert COST.reduction(whole) is None
    assert reduction.whole_s == pytest.approx(4 * sum(UNITS) / 2 / 1e6 + num_units * 1e-4)
    assert reduction.last_s == pytest.approx(4 * (UNITS[0] + UNITS[1]) / 2 / 1e6 + 2 * 1e-4)
    assert COST.overhead_s(sharded) - COST.overhead_s(whole) == pytest.approx(reduction.least_s)
    slower = CorrectedCost(COST, time_factors={2: 3.0}).reduction(sharded)
    assert (slower.whole_s, slower.last_s) == pytest.approx((3 * reduction.whole_s, 3 * reduction.last_s))
    assert CorrectedCost(COST).reduction(whole) is None


def test_of_known_sizes_a_model_reduces_as_long_as_one_of_ours():
    spec, cluster = model_preset("llama-7b"), cluster_preset("1x8xH100-80GB")
    sizes = (unit_size(spec, "input"), *(unit_size(spec, "layer"),) * spec.num_layers, unit_size(spec, "output"))
    links = (LinkRow(degree=8, latency_s=0.0, bytes_per_s=1e9),)
    rows = [row(lengths, degree) for degree in (1, 8) for lengths in PACKS]
    measured = DualLayerCost(
        table(rows, num_layers=spec.num_layers, num_params=spec.num_params, links=links), cluster=cluster,
        unit_params=sizes,
    )  # fmt: skip
    scheme = replace(uniform_scheme(spec.num_layers, degree=8, method=Method.ULYSSES), shard_gradients=True)
    ours, theirs = AnalyticCost(model=spec, cluster=cluster).reduction(scheme), measured.reduction(scheme)
    assert theirs.whole_s * 1e9 == pytest.approx(4 * 7 / 8 * spec.num_params)
    assert ours.last_s / ours.whole_s == pytest.approx(theirs.last_s / theirs.whole_s, rel=0.02)


def test_strategies_that_shard_otherwise_do_not_follow_one_another_in_a_step():
    whole, sharded = (homogeneous(scheme, 4) for scheme in schemes())
    assert COST.switch_s(sharded, sharded) == COST.switch_s(whole, whole) == 0.0
    assert COST.switch_s(whole, sharded) == COST.switch_s(sharded, whole) == MIXED_S


def test_only_known_units_of_whole_weights_are_sharded():
    gather = LayerGatherCost(unit_params=UNITS, unit_frozen_bytes=(0,) * len(UNITS), dtype="float32")
    for cost in (DualLayerCost(TABLE, cluster=CLUSTER), COST.with_gather(gather)):
        with pytest.raises(InputError, match="its gradients are not of layers with whole weights"):
            cost.sequence_times_s([64], schemes()[1])


def test_plans_shard_them_where_whole_gradients_leave_little_room():
    units = (1_000, *(10_000,) * LAYERS, 1_000)
    rows = [row(lengths, degree) for degree in (1, 2, 4) for lengths in PACKS]
    profile = table(rows, links=(LinkRow(degree=4, latency_s=1e-6, bytes_per_s=1e10),), num_params=sum(units))
    space = SearchSpace(max_stages=1, methods=(Method.ULYSSES,), shard_gradients=GradientSharding.AUTO)
    for memory_bytes, joins in ((1 << 30, False), (1_060_000, True)):
        cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=memory_bytes))
        cost = DualLayerCost(profile, cluster=cluster, unit_params=units)
        problem = make_problem(cost, cluster=cluster, num_layers=LAYERS, max_length=256, search_space=space)
        assert any(candidate.scheme.shard_gradients for candidate in problem.candidates) == joins
