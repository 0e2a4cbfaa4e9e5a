"""Schemes that shard gradients: what they hold, what they cost, and when plans may have them."""

from dataclasses import replace

import numpy as np
import pytest

import lengthwise
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import forwards_in
from lengthwise.core.parameter_shapes import stage_unit_sizes
from lengthwise.core.pipeline_config import Method, homogeneous, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.links import LINK_EFFICIENCY, call_s
from lengthwise.cost.memory_model import state_parts
from lengthwise.cost.weight_shards import held_params
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.search_space import DEFAULT_METHODS, SearchSpace, make_problem
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.plan.uniform.tune import tuning_batches
from lengthwise.sim.engine import simulate

SAME = 1 + 1e-9
"""Rounding of sums."""
MODEL, CLUSTER = model_preset("llama-7b"), cluster_preset("2x8xH100-80GB")
COST = AnalyticCost(model=MODEL, cluster=CLUSTER)


def schemes(degree=8, stages=1):
    """One with whole gradients, and one that shards them."""
    whole = uniform_scheme(MODEL.num_layers, degree=degree, stages=stages, method=Method.ULYSSES)
    return whole, replace(whole, shard_gradients=True)


@pytest.mark.parametrize(("name", "stages"), [("llama-7b", 1), ("llama-7b", 4), ("llama-tiny", 1), ("llama-tiny", 2)])
def test_the_units_of_a_stage_are_what_it_holds(name, stages):
    spec = model_preset(name)
    scheme = uniform_scheme(spec.num_layers, degree=2, stages=stages, method=Method.RING)
    for stage in range(stages):
        assert sum(stage_unit_sizes(spec, scheme, stage)) == held_params(spec, scheme, stage=stage)


def test_a_rank_has_a_share_of_its_gradients_and_two_units_whole():
    whole, sharded = schemes()
    (_, all_bytes, _), (_, share_bytes, _) = (
        state_parts(MODEL, num_devices=16, dtype="bfloat16", gradient_shares=number) for number in (1, 8)
    )
    assert share_bytes == all_bytes / 8 == MODEL.num_params / 2
    layer = stage_unit_sizes(MODEL, sharded, 0)[1]
    saved = COST.peak_bytes(0, whole, num_devices=16) - COST.peak_bytes(0, sharded, num_devices=16)
    assert all_bytes - share_bytes - 2 * 4 * 1.125 * layer <= saved < all_bytes - share_bytes
    assert COST.max_tokens(sharded, num_devices=16) > 1.3 * COST.max_tokens(whole, num_devices=16)


def test_a_micro_batch_pays_for_what_its_backward_does_not_hide():
    whole, sharded = schemes()
    reduction, device = COST.reduction(sharded), CLUSTER.device
    assert COST.reduction(whole) is None
    sent = 7 / 8 * 4 * MODEL.num_params / (LINK_EFFICIENCY * device.link_bytes_per_s)
    assert reduction.whole_s == pytest.approx(sent + 34 * call_s(8, CLUSTER))
    hidden_s = (1 - device.overlap_slowdown) * (reduction.whole_s - reduction.last_s)
    assert reduction.least_s == pytest.approx(reduction.whole_s - hidden_s)
    assert COST.overhead_s(sharded) - COST.overhead_s(whole) == pytest.approx(reduction.least_s)
    covers_s = np.linspace(0, 2 * reduction.whole_s, 50)
    exposed_s = [reduction.least_s + reduction.late_s(cover_s) for cover_s in covers_s]
    assert exposed_s[0] == pytest.approx(reduction.whole_s) and exposed_s[-1] == reduction.least_s
    assert (np.diff(exposed_s) <= 0).all()
    across = COST.reduction(schemes(degree=16)[1])
    assert across.whole_s > reduction.whole_s, "the ports of a node are slower than its links"


def test_shares_are_pushed_with_fewer_bytes_where_pipelines_span_nodes_and_switches_push_alone():
    (one, other), (wide, wide_shares) = schemes(), schemes(degree=16)
    push_s = {scheme: COST.update_parts(homogeneous(scheme, 16)).push_s for scheme in (one, other, wide, wide_shares)}
    assert push_s[other] <= push_s[one] and push_s[wide_shares] < push_s[wide] / 2
    before, after = (homogeneous(scheme, 16) for scheme in (other, one))
    pushed_s = COST.mover.exchange_s(before, 4, of_gradients=True)
    assert COST.switch_s(before, after) == pushed_s > 0 == COST.switch_s(before, before)


def problem_of(mode, model="llama-13b", max_length=60_000, samples=()):
    spec = model_preset(model)
    return make_problem(
        AnalyticCost(model=spec, cluster=CLUSTER), cluster=CLUSTER, num_layers=spec.num_layers, max_length=max_length,
        search_space=SearchSpace(max_stages=2, shard_gradients=mode), samples=samples,
    )  # fmt: skip


@pytest.fixture(scope="module")
def typical_problems():
    """Without and with sharded gradients, of batches of web text."""
    lengths = np.minimum(synthetic_lengths("commoncrawl", 400), 16_384)
    samples = [lengths[number::4] for number in range(4)]
    modes = GradientSharding.NONE, GradientSharding.AUTO
    return [problem_of(mode, max_length=16_384, samples=samples) for mode in modes]


def test_sharded_gradients_join_where_they_pay_and_leave_all_else_as_it_was():
    none, auto, every = map(problem_of, GradientSharding)
    assert not any(candidate.scheme.shard_gradients for candidate in none.candidates)
    families = {c.family[:3] for c in auto.candidates if c.scheme.shard_gradients}
    assert 0 < len(families) < len({c.family for c in none.candidates})
    assert all(
        c.scheme.shard_gradients == (c.scheme.degree > 1 and c.scheme.weights == "whole") for c in every.candidates
    )
    assert [c.scheme for c in none.candidates] == [c.scheme for c in auto.candidates if not c.scheme.shard_gradients]


@pytest.mark.parametrize("max_length", [2_000, 60_000])
def test_where_other_schemes_are_as_fast_nothing_joins(max_length):
    """A 7B has room for whole gradients on one device, and longer sequences on more of them."""
    auto = problem_of(GradientSharding.AUTO, "llama-7b", max_length)
    assert not any(candidate.scheme.shard_gradients for candidate in auto.candidates)
    every = problem_of(GradientSharding.ALL, "llama-7b", max_length)
    assert any(candidate.scheme.shard_gradients for candidate in every.candidates)


@pytest.mark.deep  # by default: where they pay, above
def test_they_join_where_they_pay_with_offload_or_tiles_alone():
    """Equal sequences that no device holds without both: shares of gradients leave room for a faster method."""
    spec, cluster, lengths = model_preset("llama-3-8b"), cluster_preset("1x3xH100-80GB"), (25_000,) * 8
    batch = GlobalBatch(step=0, ids=tuple(range(8)), lengths=lengths)

    def plan_under(mode):
        problem = make_problem(
            AnalyticCost(model=spec, cluster=cluster), cluster=cluster, num_layers=spec.num_layers, max_length=25_000,
            search_space=SearchSpace(shard_gradients=mode, methods=DEFAULT_METHODS), samples=[np.array(lengths)],
        )  # fmt: skip
        return Planner(policy="auto", problem=problem)(batch)

    auto, every = plan_under(GradientSharding.AUTO), plan_under(GradientSharding.ALL)
    assert auto.time_s <= 1.005 * every.time_s
    assert any(pipeline.scheme.shard_gradients for pipeline in auto.pipelines)


def test_they_join_where_nothing_else_holds_the_longest_sequence():
    none = problem_of(GradientSharding.NONE)
    longest = max(candidate.max_tokens for candidate in none.candidates)
    auto = problem_of(GradientSharding.AUTO, max_length=longest + 1)
    assert max(candidate.max_tokens for candidate in auto.candidates) > longest


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("policy", ["padded", "static", "bucket", "packed", "hotspa", "dcp-inter", "dcp-intra"])
def test_no_baseline_is_slower_for_them_on_the_batches_that_it_is_tuned_on(typical_problems, policy):
    times_s = []
    for problem in typical_problems:
        plans = map(Planner(policy=policy, problem=problem), (priced.batch for priced in tuning_batches(problem)))
        times_s.append(sum(plan.time_s for plan in plans))
    assert any(candidate.scheme.shard_gradients for candidate in typical_problems[1].candidates)
    assert times_s[1] <= times_s[0] * SAME


def test_plans_with_sharded_gradients_are_faster_and_simulated_as_priced():
    wanted = {"model": "llama-13b", "cluster": "2x8xH100-80GB", "steps": 1, "max_stages": 1, "offload": "none"}
    wanted["tokens_per_step"] = 60_000  # which are planned faster
    plans = {mode: lengthwise.plan("commoncrawl", shard_gradients=mode, **wanted) for mode in ("none", "auto")}
    whole_s, sharded_s = (sum(plan.time_s for plan in plans[mode]) for mode in ("none", "auto"))
    assert sharded_s < 0.99 * whole_s
    cost = AnalyticCost(model=model_preset("llama-13b"), cluster=CLUSTER)
    for plan in plans["auto"]:
        assert plan.lower_bound_s <= plan.time_s == pytest.approx(simulate(plan).step_time_s)
        for pipeline in plan.pipelines:
            for m in pipeline.micro_batches if pipeline.scheme.shard_gradients else ():
                scheme = pipeline.scheme_of(m)
                computed_s, reduction = cost.time_s(m.pack.lengths, scheme), cost.reduction(scheme)
                comm_s = cost.comm_times_s(np.array(m.pack.lengths), scheme).sum()
                forward = 1 / forwards_in(scheme.recompute)
                cover_s = (computed_s - cost.overhead_s(scheme) - comm_s) * (1 - forward)
                assert m.time_s == pytest.approx(computed_s + reduction.late_s(cover_s))
                assert m.comm_s >= reduction.least_s
    assert any(pipeline.scheme.shard_gradients for plan in plans["auto"] for pipeline in plan.pipelines)


def test_a_share_needs_somebody_to_share_with():
    with pytest.raises(InputError, match="a scheme of degree 1 with whole weights has shard_gradients=false"):
        replace(uniform_scheme(4), shard_gradients=True)
