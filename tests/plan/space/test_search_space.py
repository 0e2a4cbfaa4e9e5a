"""Which schemes a cluster offers, and what batches planning looks at."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.candidate import stages_of
from lengthwise.plan.space.search_space import (
    DEFAULT_METHODS,
    NUM_SAMPLES,
    SHARDED_METHODS,
    RecomputeMode,
    SearchSpace,
    first_batches,
    make_problem,
    sample_lengths,
)
from lengthwise.plan.space.sharded_gradients import GradientSharding
from tests.plan.costs import make_batch


def test_levels_of_recompute_are_none_all_and_eighths_between():
    assert RecomputeMode.AUTO.levels(40) == (0, 5, 10, 15, 20, 25, 30, 35, 40)
    assert RecomputeMode.AUTO.levels(4) == (0, 1, 2, 3, 4)
    assert RecomputeMode.NONE.levels(40) == (0,) and RecomputeMode.ALL.levels(40) == (40,)


def test_the_pool_keeps_its_limits_and_what_fits():
    cluster = cluster_preset("2x4xH100-80GB")
    model = model_preset("llama-tiny")
    problem = make_problem(
        AnalyticCost(model=model, cluster=cluster),
        cluster=cluster,
        num_layers=model.num_layers,
        max_length=1000,
        search_space=SearchSpace(max_degree=4, max_stages=2, methods=(Method.RING,), recompute=RecomputeMode.NONE),
    )
    schemes = [candidate.scheme for candidate in problem.candidates]
    assert {(s.degree, s.num_stages) for s in schemes} == {(d, p) for d in (1, 2, 4) for p in (1, 2)}
    assert {s.methods[0] for s in schemes} == {Method.DENSE, Method.RING}
    assert {s.num_recomputed for s in schemes} == {0}
    assert problem.devices_per_node == 4


def test_a_refusal_names_the_leanest_scheme_that_the_cluster_has_devices_for():
    cluster = cluster_preset("1x8xH100-80GB")
    model = model_preset("llama-66b")
    with pytest.raises(InfeasibleError, match=r"the leanest, <(8,1|4,2|2,4|1,8)>"):
        make_problem(
            AnalyticCost(model=model, cluster=cluster),
            cluster=cluster,
            num_layers=model.num_layers,
            max_length=1000,
            search_space=SearchSpace(),
        )


def one_token_on(model, cluster, memory_bytes, space, *, has_spare):
    """The problem of one token on devices of so many bytes."""
    device = replace(cluster.device, memory_bytes=memory_bytes, margin_bytes=0)
    cluster = replace(cluster, device=device)
    cost = AnalyticCost(model=model, cluster=cluster, dtype="bfloat16")
    spare = cost.with_state_on_host() if has_spare else None
    return make_problem(
        cost, cluster=cluster, num_layers=model.num_layers, max_length=1, search_space=space, spare=spare
    )


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("has_spare", [True, False])
@pytest.mark.parametrize(
    ("name", "on", "limits"),
    [
        ("llama-3-70b", "1x8xA100-80GB", {}),
        ("llama-7b", "1x4xH100-80GB", {"methods": (Method.RING,), "shard_gradients": GradientSharding.AUTO}),
        ("llama-7b", "3x1xH100-80GB", {"max_degree": 1, "recompute": RecomputeMode.NONE}),
        ("llama-tiny", "2x2xH100-80GB", {"max_stages": 1}),
    ],
)
def test_what_the_leanest_scheme_takes_with_one_token_is_enough_for_a_plan(name, on, limits, has_spare):
    model, cluster, space = model_preset(name), cluster_preset(on), SearchSpace(**limits)
    with pytest.raises(InfeasibleError) as refused:
        one_token_on(model, cluster, 1 << 20, space, has_spare=has_spare)
    least = int(refused.value.value)
    problem = one_token_on(model, cluster, least, space, has_spare=has_spare)
    assert Planner(policy="auto", problem=problem)(make_batch([1])).num_computed_tokens == 1
    with pytest.raises(InfeasibleError) as refused:
        one_token_on(model, cluster, int(0.999 * least), space, has_spare=has_spare)
    assert refused.value.value == least


def test_a_refusal_says_what_other_settings_would_take():
    model, cluster = model_preset("llama-7b"), cluster_preset("1x4xH100-80GB", memory_gib=20)
    cost = AnalyticCost(model=model, cluster=cluster, dtype="bfloat16")
    given = {"cluster": cluster, "num_layers": model.num_layers, "max_length": 1000}
    space = SearchSpace(methods=(Method.RING,), max_stages=1)
    with pytest.raises(InfeasibleError) as refused:
        make_problem(cost, search_space=space, **given)
    found = re.search(r"With plan.max_stages=(\d+), (\S+) \S+ takes", str(refused.value))
    assert found or "megatron_ts among plan.methods" in str(refused.value)
    assert "With train.offload_state=auto the optimizer's state may be in host memory" in str(refused.value)
    with pytest.raises(InfeasibleError) as refused:
        make_problem(cost, search_space=space, spare=cost.with_state_on_host(), **given)
    assert "train.offload_state" not in str(refused.value)


def test_pipelines_of_different_numbers_of_stages_tile_a_cluster_that_no_single_number_divides():
    cluster = cluster_preset("11x4xA800-80GB")
    model = model_preset("llama-3-70b")
    lengths = np.minimum(synthetic_lengths("commoncrawl", 200, 0), 32_768)
    problem = make_problem(
        AnalyticCost(model=model, cluster=cluster, dtype="bfloat16"),
        cluster=cluster,
        num_layers=model.num_layers,
        max_length=32_768,
        search_space=SearchSpace(methods=(Method.MEGATRON_TS,), recompute=RecomputeMode.ALL),
        samples=[lengths],
    )
    plan = Planner(policy="auto", problem=problem)(make_batch(lengths.tolist()))
    assert len({scheme.num_stages for scheme in plan.strategies[0].schemes}) > 1


def test_typical_batches_are_of_the_same_lengths_but_not_the_planned_ones():
    lengths = LengthIndex(lengths=synthetic_lengths("commoncrawl", 100_000, 0))
    planned = first_batches(lengths, tokens_per_step=50_000, seed=5, steps=NUM_SAMPLES)
    samples = list(sample_lengths(lengths, tokens_per_step=50_000, seed=5))
    assert len(samples) == NUM_SAMPLES
    assert not any(np.array_equal(sample, batch.lengths) for sample in samples for batch in planned)
    means = np.mean(np.concatenate(samples)), np.mean(np.concatenate([batch.lengths for batch in planned]))
    assert means[0] == pytest.approx(means[1], rel=0.1)


@pytest.mark.parametrize(
    ("num_devices", "counts"), [(64, [1, 2, 4, 8]), (24, [*range(1, 9)]), (100, [*range(1, 9)]), (3, [1, 2, 3])]
)
def test_stages_are_powers_of_two_or_any_number_where_those_may_not_tile_the_cluster(num_devices, counts):
    assert stages_of(num_devices, 80) == counts
    assert stages_of(num_devices, 2) == counts[:2]


def test_where_no_scheme_has_costs_the_reason_of_the_first_is_given():
    cluster, model = cluster_preset("8x8xH100-80GB"), model_preset("llama-tiny")
    space = SearchSpace(degree=64, methods=(Method.MEGATRON_TS,))
    with pytest.raises(InfeasibleError, match="has costs: megatron_ts splits the weights of llama-tiny by its 2 key"):
        make_problem(
            AnalyticCost(model=model, cluster=cluster), cluster=cluster, num_layers=model.num_layers, max_length=1000,
            search_space=space,
        )  # fmt: skip


def test_gradients_of_weights_that_are_sharded_anyway_cannot_be_asked_for_in_shards():
    sharding = {"shard_gradients": GradientSharding.ALL}
    with pytest.raises(
        InputError, match=r"plan.shard_gradients=all, and by metp, ulysses_z ranks hold shards of weight"
    ):
        SearchSpace(methods=(Method.METP, Method.ULYSSES_Z), **sharding)
    assert SearchSpace(methods=(Method.METP, Method.RING), **sharding).has_whole_weights


def with_methods(methods, *, max_length):
    """Eight sequences of a Llama of 8B on three H100s, and the methods of the search space."""
    spec, cluster, lengths = model_preset("llama-3-8b"), cluster_preset("1x3xH100-80GB"), (max_length,) * 8
    space = SearchSpace(methods=methods, shard_gradients=GradientSharding.AUTO)
    problem = make_problem(
        AnalyticCost(model=spec, cluster=cluster), cluster=cluster, num_layers=spec.num_layers, max_length=max_length,
        search_space=space, samples=[np.array(lengths)],
    )  # fmt: skip
    used = {method for candidate in problem.candidates for method in candidate.scheme.methods}
    return Planner(policy="auto", problem=problem)(make_batch(lengths, 0)).time_s, used & set(SHARDED_METHODS)


def test_methods_that_shard_weights_join_by_themselves_where_typical_steps_gain_by_them():
    """Default methods hold 16,000 tokens too, with layers recomputed or on the host."""
    default_s, used = with_methods(None, max_length=16_000)
    assert Method.METP in used
    assert default_s <= with_methods(SearchSpace().widest.methods, max_length=16_000)[0] * 1.001
    assert default_s < 0.995 * with_methods(DEFAULT_METHODS, max_length=16_000)[0]
    assert Method.METP not in with_methods(None, max_length=2_000)[1]
