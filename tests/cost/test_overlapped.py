"""How much of an update passes hide: what their lengths, their own exchange and the device leave room for."""

from dataclasses import replace

import pytest

import lengthwise
from lengthwise.core.device_spec import DEVICES
from lengthwise.core.one_f_one_b import UpdateParts, forwards_in, pipeline_end_s
from lengthwise.core.pipeline_config import Method, homogeneous, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.overlapped import OverlappedCost, with_overlap
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import SimOptions

MODEL = model_preset("llama-7b")


def layer_by_layer(parts, cover_s, num_layers):
    """Seconds of pulls that a first forward waits for and of pushes after a last backward, one layer after another."""
    layer_s = (parts.pull_s - parts.first_pull_s) / num_layers
    arrived_s = now_s = parts.first_pull_s
    for _ in range(num_layers):
        now_s = max(now_s + cover_s / num_layers, arrived_s := arrived_s + layer_s)
    layer_s = (parts.push_s - parts.last_push_s) / num_layers
    pushed_s = 0.0
    for layer in range(num_layers):
        pushed_s = max(pushed_s, cover_s * layer / num_layers) + layer_s
    return now_s - cover_s, max(pushed_s, cover_s) + parts.last_push_s - cover_s


@pytest.mark.parametrize("cover_s", [0.0, 0.3, 1.0, 1.7, 2.0, 9.0])
def test_exposed_seconds_are_those_of_units_that_move_one_after_another(cover_s):
    parts = UpdateParts(pull_s=1.0, push_s=2.0, first_pull_s=0.1, last_push_s=0.2, rest_s=0.5)
    pull_s, push_s = layer_by_layer(parts, cover_s, 10_000)
    assert parts.exposed_pull_s(cover_s) == pytest.approx(pull_s, abs=1e-3)
    assert parts.exposed_push_s(cover_s) == pytest.approx(push_s, abs=1e-3)
    assert parts.least_s == pytest.approx(0.8) and parts.whole_s == 3.5
    slow = replace(parts, slowdown=0.25)
    hidden_s = parts.pull_s - parts.exposed_pull_s(cover_s)
    assert slow.exposed_pull_s(cover_s) == pytest.approx(1.0 - 0.75 * hidden_s)
    assert replace(parts, slowdown=1.0).least_s == parts.whole_s, "nothing is won"


@pytest.mark.parametrize(
    ("device", "is_hidden"), [("H100-80GB", True), ("A100-80GB", True), ("MI300X-192GB", False), ("cpu", False)]
)
def test_a_device_says_what_movement_beneath_passes_adds_to_them(device, is_hidden):
    cost = OverlappedCost(AnalyticCost(model=MODEL, cluster=cluster_preset(f"2x8x{device}")))
    strategy = homogeneous(uniform_scheme(MODEL.num_layers, degree=8, method=Method.ULYSSES), 16)
    whole_s = cost.whole_update_s(strategy)
    assert (cost.update_s(strategy) < whole_s * (1 - 1e-12)) == is_hidden
    assert DEVICES[device].overlap_slowdown == {"H100-80GB": 0.49, "A100-80GB": 0.88}.get(device, 1.0)
    assert with_overlap(cost.base, 0) is cost.base and with_overlap(cost.base, 1).update_s(strategy) == 0.0


@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.deep), "dcp-intra"])
def test_a_plan_hides_what_each_of_its_pipelines_has_room_for(policy):
    """From the plan's own micro-batches; simulated, it takes as long, and with the user's share as that says."""
    cost = AnalyticCost(model=MODEL, cluster=cluster_preset("2x8xH100-80GB"))
    few = {"policy": policy, "steps": 1, "max_stages": 2, "offload": "none", "methods": ["ulysses"]}
    few["tokens_per_step"] = 60_000 if policy == "auto" else 120_000
    for plan in lengthwise.plan("githubcode", model="llama-7b", cluster="2x8xH100-80GB", **few):
        if plan.num_phases > 1:
            continue
        parts, ends_s, times_s = cost.update_parts(plan.strategies[0]), [], []
        for pipeline in plan.pipelines:
            packs, stages = pipeline.micro_batches, pipeline.scheme.num_stages
            if not packs:
                continue
            forwards = [forwards_in(pipeline.recompute_of(m)) for m in packs]
            room_s = [
                max(0.0, m.time_s - m.comm_s - cost.overhead_s(pipeline.scheme_of(m))) for m in (packs[0], packs[-1])
            ]
            times_s.append(pipeline_end_s([m.time_s for m in packs], forwards, stages))
            late_s = parts.exposed_pull_s(room_s[0] / forwards[0])
            ends_s.append(times_s[-1] + late_s + parts.exposed_push_s(room_s[1] * (1 - 1 / forwards[-1])))
            if stages == 1:
                assert max(packs, key=lambda m: m.time_s).time_s == packs[-1].time_s
        assert plan.time_s == pytest.approx(max(ends_s) + parts.rest_s)
        assert plan.update_s == pytest.approx(plan.time_s - max(times_s))
        assert plan.hidden_update_s == pytest.approx(parts.whole_s - plan.update_s) and plan.hidden_update_s > 0
        assert plan.lower_bound_s <= plan.time_s and type(plan).from_json(plan.to_json()) == plan
        assert simulate(plan).step_time_s == pytest.approx(plan.time_s)
        exposed_s = simulate(plan, SimOptions(overlap=0.0)).step_time_s
        assert exposed_s == pytest.approx(plan.time_s + plan.hidden_update_s)
