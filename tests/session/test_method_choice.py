"""Which parallel methods the plans of a run choose from."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import lengthwise
from lengthwise.config.run_config import load
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import ProfileRow, ProfileTable, SharedRows
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method, homogeneous, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.fitted import FittedCost
from lengthwise.cost.profiled.measured_schemes import tables_by_scheme
from lengthwise.data.corpus import Corpus, CorpusPart
from lengthwise.data.max_length import apply_max_length
from lengthwise.plan.space.search_space import SHARDED_METHODS
from lengthwise.session.planning import make_cost, make_planner
from lengthwise.session.profile_model import shared_schemes

SPEC = model_preset("llama-tiny")
DEFAULT = {"ulysses", "ring", "megatron_ts"}


def planner_of(*settings, longest=9, memory_gib=4.0, cost=None):
    config = load(None, [*settings, "train.dtype=float32", "plan.max_stages=1"])
    cluster = cluster_preset("4xcpu", memory_gib=memory_gib)
    view = apply_max_length(LengthIndex(lengths=np.array([5, longest])), max_length=None, rule="error")
    corpus = Corpus(parts=(CorpusPart(name="two", store=SimpleNamespace(has_loss_mask=False), view=view),))
    cost = cost or AnalyticCost(model=SPEC, cluster=cluster, dtype="float32")
    return make_planner(config, cost, spec=SPEC, cluster=cluster, corpus=corpus)


def methods_in(planner):
    return {method for kind in planner.problem.candidates for method in kind.scheme.methods} - {"dense"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], DEFAULT),
        (["plan.policy=paradyse"], {*SHARDED_METHODS}),
        (["plan.methods=[ulysses, metp]"], {"ulysses", "metp"}),
        (["plan.methods=colossal_z,ring", "plan.policy=paradyse"], {"colossal_z", "ring"}),
        (["plan.method=ulysses_z", "plan.degree=2"], {"ulysses_z"}),
    ],
)
def test_plans_choose_from_the_methods_of_the_settings(settings, expected):
    assert methods_in(planner_of(*settings)) == expected


def longest_by(*methods, memory_gib):
    settings = [f"plan.methods={','.join(methods)}"]
    return planner_of(*settings, memory_gib=memory_gib).problem.leanest.max_tokens


def test_a_sequence_that_the_usual_methods_do_not_hold_is_planned_by_leaner_ones():
    usual, leanest = (longest_by(*methods, memory_gib=0.03) for methods in (DEFAULT, ["metp"]))
    assert leanest > usual
    assert methods_in(planner_of(longest=usual, memory_gib=0.03)) == DEFAULT
    for policy in ("auto", "paradyse"):
        planner = planner_of(f"plan.policy={policy}", longest=leanest, memory_gib=0.03)
        plan = planner(GlobalBatch(step=0, ids=(0, 1), lengths=(5, leanest)))
        methods = {method for pipeline in plan.pipelines for method in pipeline.scheme.methods}
        assert methods & {*SHARDED_METHODS} and not methods & {"ulysses", "ring"}
    with pytest.raises(InfeasibleError, match=f"under the leanest scheme, <4,1> m.*data.max_length={leanest} or less"):
        planner_of(longest=leanest + 1, memory_gib=0.03)
    only = f"plan.methods={','.join(DEFAULT)}"
    with pytest.raises(InfeasibleError, match=r"or plan\.methods with metp"):
        planner_of(only, "plan.shard_gradients=none", longest=usual + 1, memory_gib=0.03)
    shares = planner_of(only, longest=usual + 1, memory_gib=0.03).problem.candidates
    assert any(candidate.scheme.shard_gradients for candidate in shares), "whole gradients leave less room"


def test_compare_and_plan_take_leaner_methods_too():
    cluster = cluster_preset("4xcpu", memory_gib=0.03)
    usual = longest_by(*DEFAULT, memory_gib=0.03)
    options = {"model": SPEC, "cluster": cluster, "tokens_per_step": 2 * usual, "steps": 1, "dtype": "float32"}
    (plan,) = lengthwise.plan([usual + 40, 50, 60], policy="packed", max_stages=1, **options)
    assert {method for pipeline in plan.pipelines for method in pipeline.scheme.methods} <= {*SHARDED_METHODS}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["plan.methods=metp", "plan.method=ring"], "plan.methods: nothing may be set beside plan.method=ring"),
        (["plan.methods=[]"], "plan.methods: at least one method is needed"),
        (["plan.methods=metp,uliesses"], "plan.methods.1: input should be .* not 'uliesses'; did you mean ulysses"),
        (["plan.methods=dense"], "plan.methods.0: input should be"),
        (["plan.methods=metp", "train.compile=true", "plan.shapes=4"], "plan.methods=metp: layers whose weights are"),
    ],
)
def test_methods_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        planner_of(*settings)


def rows(scale):
    return tuple(
        ProfileRow(lengths=(n,), time_s=scale * (1e-3 + n * 1e-5 + n * n * 1e-8), spread_s=0.0, kept_bytes=1000 * n)
        for n in (32, 64, 128, 256)
    )


TABLE = ProfileTable(
    model_digest=SPEC.digest, model_name=SPEC.name, device="cpu, 1 thread(s)", dtype="float32", recompute=False,
    num_ranks=4, update_s=1e-3, rows=rows(1.0),
    shared=tuple(SharedRows(degree=4, method=method, rows=rows(0.3)) for method in ("metp", "ulysses_z")),
)  # fmt: skip


def test_only_measured_methods_can_be_chosen_from_a_profile():
    cluster = cluster_preset("4xcpu")
    cost = FittedCost(tables_by_scheme(TABLE, num_layers=SPEC.num_layers), model=SPEC, cluster=cluster)
    both = ["plan.profile=p.json", "plan.recompute=none"]
    assert methods_in(planner_of("plan.policy=paradyse", *both, cost=cost)) == {"metp", "ulysses_z"}
    with pytest.raises(
        InputError, match=r"p\.json has no measurements of ring; profile again with plan\.methods=ring,metp"
    ):
        planner_of("plan.methods=ring,metp", *both, cost=cost)


def test_a_profile_measures_the_methods_that_plans_choose_from():
    for settings, expected in ((["plan.policy=paradyse"], SHARDED_METHODS), (["plan.methods=metp"], ("metp",))):
        shared = shared_schemes(load(None, settings), SPEC, num_ranks=2, per_node=2)
        assert shared == [(2, method) for method in expected]


def test_learned_costs_know_what_ranks_shared(tmp_path):
    TABLE.save(tmp_path / "p.json")
    settings = [f"plan.profile={tmp_path}/p.json", "plan.cost=hybrid", "plan.recompute=none", "train.dtype=float32"]
    cost = make_cost(load(None, settings), SPEC, cluster_preset("4xcpu"))
    assert methods_in(planner_of("plan.policy=paradyse", *settings, cost=cost)) == {"metp", "ulysses_z"}


def test_methods_whose_weights_lie_alike_have_one_update_so_that_bounds_hold(tmp_path):
    methods = (("megatron_ts", 0.1, 0.05), ("metp", 0.3, 0.01))  # the faster one beside a slow update
    shared = tuple(
        SharedRows(degree=4, method=name, rows=rows(scale), update_s=update_s) for name, scale, update_s in methods
    )
    replace(TABLE, shared=shared).save(tmp_path / "p.json")
    settings = [f"plan.profile={tmp_path}/p.json", "plan.cost=hybrid", "plan.recompute=none", "train.dtype=float32"]
    cost = make_cost(load(None, settings), SPEC, cluster_preset("4xcpu"))
    schemes = [uniform_scheme(SPEC.num_layers, degree=4, method=Method(name)) for name, *_ in methods]
    assert [cost.update_s(homogeneous(scheme, 4)) for scheme in schemes] == pytest.approx([0.03, 0.03])
    planner = planner_of("plan.policy=paradyse", *settings, cost=cost)
    plan = planner(GlobalBatch(step=0, ids=(0,), lengths=(64,)))
    assert plan.policy == "paradyse" and plan.lower_bound_s <= plan.time_s
