"""Offload, tiles and a state on the host join the search space where they pay, and only there."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import ModelSpec, cluster_preset, model_preset
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.candidate import make_candidates
from lengthwise.plan.space.memory_ladder import TILE_TOKENS, OffloadMode
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace, make_problem
from lengthwise.plan.space.sharded_gradients import GradientSharding

MODEL: ModelSpec = replace(model_preset("llama-3-8b"), num_layers=8)
METHODS = (Method.ULYSSES, Method.MEGATRON_TS)
NOTHING = {"offload": OffloadMode.NONE, "tile_tokens": 0}


def cluster_of(name="4xH100-80GB", **changes):
    cluster = cluster_preset(name)
    return replace(cluster, device=replace(cluster.device.with_margin(), **changes))


CPUS = cluster_preset("4xcpu", memory_gib=64)


def problem_of(max_length, cluster=None, *, state_on_host=False, spare=None, samples=(), **space):
    cluster = cluster or cluster_of()
    cost = AnalyticCost(model=MODEL, cluster=cluster, state_on_host=state_on_host)
    search_space = SearchSpace(max_stages=1, **{"methods": METHODS, **space})
    return make_problem(
        cost, cluster=cluster, num_layers=8, max_length=max_length, search_space=search_space, samples=samples,
        spare=spare,
    )  # fmt: skip


def names(problem):
    return [candidate.scheme.name for candidate in problem.candidates]


def batch_of(*lengths):
    return GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=lengths)


@pytest.mark.parametrize("cluster", [cluster_of(), cluster_of(host_bytes_per_s=1e6), CPUS])
def test_nothing_joins_where_it_does_not_pay(cluster):
    short = 4096 if cluster.device.host_bytes_per_s > 1e6 else 30_000
    tiles = {"tile_tokens": 0 if cluster.device.host_bytes_per_s == 1e6 else None}
    assert names(problem_of(short, cluster, **tiles)) == names(problem_of(short, cluster, **NOTHING))
    if cluster.device.host_bytes_per_s <= 1e6:  # then only what a search space without recompute needs
        joined = set(names(problem_of(100_000, cluster, **tiles))) - set(names(problem_of(100_000, cluster, **NOTHING)))
        assert joined <= set(names(problem_of(100_000, cluster, recompute=RecomputeMode.NONE, max_degree=2, **tiles)))


def test_offload_joins_where_attention_hides_the_copies_that_recompute_would_avoid():
    most = 300_000
    plain, wider = problem_of(most, **NOTHING), problem_of(most)
    added = [candidate for candidate in wider.candidates if candidate.scheme.offload]
    assert names(wider)[: len(plain.candidates)] == names(plain) and 0 < len(added) < len(plain.candidates) / 2
    fastest = min(
        (candidate for candidate in wider.candidates if candidate.max_tokens >= most),
        key=lambda candidate: candidate.times_s(np.array([most]))[0] + candidate.overhead_s,
    )
    assert fastest.scheme.offload and fastest.scheme.num_recomputed < 8


def test_longer_sequences_fit_with_the_ladder_and_the_plainest_rungs_are_left_out_by_settings():
    reach = problem_of(1, **NOTHING).leanest.max_tokens
    longer = reach * 14 // 10
    assert problem_of(longer).leanest.max_tokens >= longer
    assert not any(candidate.scheme.tile_tokens for candidate in problem_of(longer, tile_tokens=0).candidates)
    tiled = problem_of(longer, offload=OffloadMode.NONE)
    assert tiled.leanest.scheme.tile_tokens and not any(candidate.scheme.offload for candidate in tiled.candidates)
    for mode, shares in ((RecomputeMode.NONE, {0}), (RecomputeMode.ALL, {8})):
        assert {c.scheme.num_recomputed for c in problem_of(longer, recompute=mode).candidates} == shares
    everywhere = problem_of(4096, offload=OffloadMode.ALL, tile_tokens=1024)
    assert all(c.scheme.num_offloaded == 8 and c.scheme.tile_tokens == 1024 for c in everywhere.candidates)


@pytest.mark.parametrize("policy", ["static", "dcp-intra", "auto"])
@pytest.mark.parametrize("lengths", [(250_000, 30_000, 9000, 500), (900_000, 4000)])
def test_a_plan_is_never_slower_for_more_rungs(policy, lengths):
    samples = [np.array(lengths)]
    plans = []
    for space in (NOTHING, {}):
        try:
            problem = problem_of(max(lengths), samples=samples, **space)
            plans.append(Planner(policy=policy, problem=problem)(batch_of(*lengths)))
        except InfeasibleError:
            assert space is NOTHING
    assert plans[-1].time_s <= plans[0].time_s * (1 + 1e-9)
    assert StepPlan.from_json(plans[-1].to_json()).digest == plans[-1].digest


def uniform_choices(cluster, shares=(0, 2, 4, 6, 8)):
    """Every scheme of one method whose layers are recomputed and offloaded evenly, with tiles and without."""
    for degree, recomputed, offloaded, tile in product((1, 2, 4), shares, shares, (0, TILE_TOKENS)):
        for method in [Method.DENSE] if degree == 1 else METHODS:
            yield uniform_scheme(
                8, degree=degree, method=method, recomputed=recomputed, offloaded=offloaded, tile_tokens=tile
            )


@pytest.mark.parametrize("name", ["4xH100-80GB", "4xA800-80GB", "4xGB200-186GB"])
@pytest.mark.parametrize("length", [20_000, 150_000, 400_000, 1_000_000])
def test_the_choice_is_at_most_two_per_cent_slower_than_the_best_uniform_one(name, length):
    cluster = cluster_of(name)
    cost = AnalyticCost(model=MODEL, cluster=cluster)
    every = make_candidates(uniform_choices(cluster), cost, num_devices=4)

    def fastest_s(candidates):
        fitting = [candidate for candidate in candidates if candidate.max_tokens >= length]
        return min(
            (float(candidate.times_s(np.array([length]))[0]) + candidate.overhead_s for candidate in fitting),
            default=np.inf,
        )

    assert fastest_s(problem_of(length, cluster).candidates) <= 1.02 * fastest_s(every)


CORPORA = {
    "short": (600, 1200, 300, 4000, 900, 2500, 700, 8000),
    "mixed": (120_000, 2000, 9000, 700, 30_000, 500),
    "long": (400_000, 90_000),
}
SETTINGS = list(product(("4xH100-80GB", "4xA800-80GB", "4xGB200-186GB"), (34, 40, 80), CORPORA))


@pytest.mark.parametrize(
    ("name", "memory_gib", "corpus"),
    [
        ("4xH100-80GB", 80, "mixed"),
        *(pytest.param(*setting, marks=pytest.mark.deep) for setting in SETTINGS if setting != SETTINGS[7]),
    ],
)
def test_a_plan_is_at_most_two_per_cent_slower_than_the_best_plan_of_one_choice_for_all(name, memory_gib, corpus):
    """Steps of several sequences: every uniform choice packs and deals them as well as it can."""
    lengths = CORPORA[corpus]
    cluster = cluster_of(name, memory_bytes=memory_gib << 30)
    problem = problem_of(max(lengths), cluster, samples=[np.array(lengths)], offload=OffloadMode.AUTO)
    plan = Planner(policy="auto", problem=problem)(batch_of(*lengths))
    schemes = [
        replace(scheme, keep_attention=keeps)
        for scheme in uniform_choices(cluster)
        for keeps in ((False, True) if any(scheme.recompute) else (False,))
    ]
    times_s = []
    for candidate in make_candidates(schemes, problem.cost, num_devices=4):
        if candidate.max_tokens >= max(lengths):
            alone = replace(problem, candidates=(candidate,))
            times_s.append(Planner(policy="packed", problem=alone)(batch_of(*lengths)).time_s)
    assert times_s and plan.time_s <= 1.02 * min(times_s)  # 34 GiB hold the longest corpus under one choice alone


def test_groups_of_heads_have_sharded_gradients_where_these_may_be_chosen():
    spec, cluster = model_preset("qwen2.5-0.5b"), cluster_preset("1x2xA100-40GB")

    def reach(mode):
        problem = make_problem(
            AnalyticCost(model=spec, cluster=cluster, state_on_host=True), cluster=cluster, num_layers=spec.num_layers,
            max_length=1 << 30, search_space=SearchSpace(methods=(Method.ULYSSES,), shard_gradients=mode),
        )  # fmt: skip
        return max(c.max_tokens for c in problem.candidates if c.scheme.head_groups > 1)

    assert reach(GradientSharding.AUTO) >= reach(GradientSharding.ALL) > reach(GradientSharding.NONE)


def test_attention_computes_groups_of_heads_where_nothing_else_holds_the_longest_sequence():
    reach = problem_of(1 << 30, has_head_groups=False).leanest.max_tokens
    assert all(candidate.scheme.head_groups == 1 for candidate in problem_of(reach).candidates)
    longer = problem_of(reach * 12 // 10, samples=[np.array([reach * 12 // 10])])
    leanest = longer.leanest
    assert leanest.scheme.head_groups > 1 and leanest.max_tokens >= reach * 12 // 10
    plan = Planner(policy="auto", problem=longer)(batch_of(reach * 12 // 10, 4000))
    assert max(p.scheme_of(m).head_groups for p in plan.pipelines for m in p.micro_batches) > 1
    for settings in ({"offload": OffloadMode.NONE}, {"recompute": RecomputeMode.NONE}, {"offload": OffloadMode.ALL}):
        grouped = [c.scheme for c in problem_of(1 << 30, **settings).candidates if c.scheme.head_groups > 1]
        assert grouped and not any(
            (settings.get("offload") is OffloadMode.NONE and scheme.offload)
            or (settings.get("offload") is OffloadMode.ALL and scheme.num_offloaded < 8)
            or ("recompute" in settings and scheme.num_recomputed)
            for scheme in grouped
        )


def test_recomputed_layers_keep_attention_where_it_is_most_of_what_they_would_run_again():
    short, long = problem_of(2000, **NOTHING), problem_of(300_000, **NOTHING)
    assert not any(candidate.scheme.keep_attention for candidate in short.candidates)
    selective = [candidate for candidate in long.candidates if candidate.scheme.keep_attention]
    assert selective and len(selective) < len(long.candidates) / 2
    length = np.array([300_000])
    for candidate in selective:
        full = replace(candidate.scheme, keep_attention=False)
        assert long.cost.sequence_times_s(length, candidate.scheme) < long.cost.sequence_times_s(length, full)
        assert long.cost.max_tokens(candidate.scheme, num_devices=4) < long.cost.max_tokens(full, num_devices=4)
    for mode in (RecomputeMode.NONE, RecomputeMode.ALL):
        assert not any(c.scheme.keep_attention for c in problem_of(300_000, recompute=mode).candidates)
    plan = Planner(policy="auto", problem=problem_of(300_000, samples=[length], **NOTHING))(batch_of(300_000, 3000))
    assert any(p.scheme_of(m).keep_attention for p in plan.pipelines for m in p.micro_batches)
    assert StepPlan.from_json(plan.to_json()).digest == plan.digest


def test_the_state_goes_to_the_host_where_nothing_else_holds_the_longest_sequence():
    cluster = cluster_of(memory_bytes=16 << 30)
    spare = AnalyticCost(model=MODEL, cluster=cluster, state_on_host=True)
    reach = problem_of(1 << 30, cluster).leanest.max_tokens
    assert not problem_of(reach, cluster, spare=spare).cost.state_on_host
    longer = problem_of(reach + reach // 50, cluster, spare=spare)
    assert longer.cost.state_on_host and longer.leanest.max_tokens > reach
    too_long = problem_of(1 << 30, cluster, spare=spare)  # refused either way: the limit told is the one that holds
    assert problem_of(too_long.leanest.max_tokens, cluster, spare=spare).leanest.max_tokens >= reach + reach // 50


def test_too_little_host_memory_is_refused_with_numbers():
    cluster = cluster_of()
    cluster = replace(cluster, device=cluster.device.with_host_memory(1))
    problem = problem_of(1 << 20, cluster, offload=OffloadMode.ALL)
    with pytest.raises(InfeasibleError, match=r"puts [\d.]+ GiB per device into host memory .* has 1.0+ GiB") as caught:
        problem.check_fits(np.array([4000, 1 << 20]))
    assert "cluster.host_memory_gib" in str(caught.value)


def test_offload_on_a_cpu_is_refused():
    with pytest.raises(InputError, match="nothing of a cpu can be put into host memory"):
        problem_of(4096, cluster_preset("4xcpu"), offload=OffloadMode.ALL)
