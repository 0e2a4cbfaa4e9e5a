"""Zero bubble in the search space: which schemes split backwards, and that plans with them are never slower."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.one_f_one_b import most_weights_in
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.zero_bubble import pass_times
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.stage_time import layer_flops_per_s
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.separable import SeparableCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.split_backwards import ZeroBubble, can_split
from lengthwise.sim.engine import simulate
from tests.plan.costs import StagesFitMore, make_batch, make_problem

LAYERS = 4


def problem_of(mode, **options):
    return make_problem(
        StagesFitMore(capacity=60, loss=0.5), num_devices=4, stages=[1, 2, 4], recomputed=(0, LAYERS), max_length=200,
        zero_bubble=mode, **options,
    )  # fmt: skip


def test_auto_adds_schemes_that_split_backwards_and_all_replaces_those_that_can():
    none, auto, every = ({c.scheme for c in problem_of(mode).candidates} for mode in ZeroBubble)
    able = {scheme for scheme in none if can_split(scheme)}
    assert able == {scheme for scheme in none if scheme.num_stages > 1 and not any(scheme.recompute)}
    split = {replace(scheme, zero_bubble=True) for scheme in able}
    assert auto == none | split and every == none - able | split


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (0, 1, 3, 4, 5))])
def test_plans_that_may_split_backwards_are_no_slower(seed):
    rng = np.random.default_rng(seed)
    batch = make_batch(np.minimum(rng.lognormal(3, 1, 9).astype(int) + 1, 200))
    none, auto = (
        Planner(policy="auto", problem=problem_of(mode))(batch) for mode in (ZeroBubble.NONE, ZeroBubble.AUTO)
    )
    assert auto.time_s <= none.time_s * (1 + 1e-9)
    assert auto.lower_bound_s <= auto.time_s


def test_a_plan_says_what_gradients_of_weights_take_and_the_simulator_comes_to_its_seconds():
    batch = make_batch([30, 25, 20, 18, 9, 8, 7])
    problem = problem_of(ZeroBubble.ALL)
    plan = Planner(policy="static", problem=replace(problem, candidates=_of_two_stages(problem)))(batch)
    for pipeline in plan.pipelines:
        assert pipeline.scheme.zero_bubble
        for m, weights_s in zip(pipeline.micro_batches, pass_times(pipeline).weights_s):
            assert 0 < weights_s < m.time_s / 3 and m.weights_s == weights_s
    assert simulate(plan).step_time_s == pytest.approx(plan.time_s, rel=1e-12)
    whole = tuple(replace(p, scheme=replace(p.scheme, zero_bubble=False)) for p in plan.pipelines)
    assert simulate(replace(plan, pipelines=whole)).step_time_s > plan.time_s * 1.02


def _of_two_stages(problem):
    return tuple(c for c in problem.candidates if c.num_stages == 2 and c.scheme.zero_bubble)


def test_gradients_of_weights_are_half_of_a_backwards_products_of_layers_that_are_not_recomputed():
    model, cluster = model_preset("llama-7b"), cluster_preset("1x8xH100-80GB")
    cost, lengths = AnalyticCost(model=model, cluster=cluster), np.array([1, 500, 30_000, 400_000])
    for recomputed in (0, 8, 32):
        scheme = uniform_scheme(32, degree=2, stages=2, method=Method.ULYSSES, recomputed=recomputed)
        layers = sum(not scheme.recompute[layer] for layer in scheme.layers_of_stage(1))
        seconds = 2 * model.layer_matmul_params / 2 / layer_flops_per_s(model, cluster.device, "bfloat16")
        weights_s = cost.weight_times_s(lengths, scheme)
        np.testing.assert_allclose(weights_s, layers * seconds * lengths, rtol=1e-9)
        by_share = SeparableCost.weight_times_s(cost, lengths, scheme)
        most = most_weights_in(scheme.recompute) * cost.sequence_times_s(lengths, scheme)
        assert (by_share <= most).all() and by_share[-1] <= most[-1] / 5, "attention has no weights"
        if recomputed < 32:  # that of FLOPs alone, as if attention and products ran at one rate, and no head
            assert by_share[:2] == pytest.approx(weights_s[:2], rel=0.15)
        corrected = CorrectedCost(cost, time_factors={2: 1.5})
        np.testing.assert_allclose(corrected.weight_times_s(lengths, scheme), 1.5 * weights_s)


def test_split_backwards_hold_as_many_tokens_unless_the_head_is_in_the_way():
    """Each stage keeps what the first one does, and a message more; the last one has the head and its loss besides."""
    cluster = cluster_preset("1x8xH100-80GB")
    for model, least in ((model_preset("llama-7b"), 0.85), (replace(model_preset("llama-7b"), vocab_size=2000), 0.99)):
        cost = AnalyticCost(model=model, cluster=cluster)
        whole = uniform_scheme(32, degree=2, stages=4, method=Method.ULYSSES)
        tokens, split = (cost.max_tokens(scheme, num_devices=8) for scheme in (whole, replace(whole, zero_bubble=True)))
        assert least * tokens <= split <= tokens
    for stage in range(4):
        kept, of_split = (
            cost.stage_memory(scheme, stage, num_devices=8).moments[0].activations.per_token
            for scheme in (whole, replace(whole, zero_bubble=True))
        )
        assert kept * 4 == pytest.approx(of_split * (4 - stage))
