"""What steps take sets the costs right, on every rank alike; what drifts far is told and measured again."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.runtime.comm.out_of_memory import MicroBatchFailure
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.run_state import MicroBatchTiming
from lengthwise.session.online_calibration import EVERY, OnlineCalibration
from tests.session.memory_limit import Lying

LAYERS = 4
DENSE, SHARED = (
    uniform_scheme(LAYERS, degree=degree, stages=1, method=method, recomputed=0)
    for degree, method in ((1, Method.DENSE), (2, Method.ULYSSES))
)


def cost_of(world):
    return Lying(cluster_preset(f"{world.size}xcpu", memory_gib=1 / 1024))


def plan_with(world):
    def plan(cost):
        cluster = cluster_preset(f"{world.size}xcpu", memory_gib=1 / 1024)
        search_space = SearchSpace(max_stages=1, methods=(Method.ULYSSES,))
        return SimpleNamespace(
            problem=make_problem(cost, cluster=cluster, num_layers=LAYERS, max_length=64, search_space=search_space),
            cost=cost,
        )

    return plan


def step_of(world, number, taken):
    """Each rank computed a micro-batch of its own, predicted to take a second and a hundred bytes."""
    pack = Pack(ids=(0,), lengths=(8,))
    planned = PlannedMicroBatch(pack=pack, time_s=1.0, comm_s=0.0, peak_bytes=150)
    pipelines = tuple(
        Pipeline(ranks=(rank,), phase=0, scheme=DENSE, state_bytes=50, micro_batches=(planned,))
        for rank in range(world.size)
    )
    plan = StepPlan(
        step=number,
        policy="by hand",
        loss_normaliser=7,
        update_s=0.0,
        time_s=1.0,
        lower_bound_s=0.0,
        pipelines=pipelines,
    )
    time_s, peak = taken[world.rank]
    measured = MicroBatchTiming(pipeline=world.rank, micro_batch=0, time_s=time_s, peak_bytes=peak)
    return SimpleNamespace(number=number, plan=plan, measured=[measured])


def staged_step_of(world, number, taken):
    """A pipeline of all ranks as stages computed two micro-batches, each predicted to take a second."""
    planned = PlannedMicroBatch(pack=Pack(ids=(0,), lengths=(8,)), time_s=1.0, comm_s=0.0, peak_bytes=150)
    scheme = uniform_scheme(LAYERS, degree=1, stages=world.size, method=Method.DENSE, recomputed=0)
    pipelines = (Pipeline(ranks=(0, 1), scheme=scheme, state_bytes=50, micro_batches=(planned, planned)),)
    plan = replace(step_of(world, number, [(0, 0)] * 2).plan, pipelines=pipelines)
    times_s = taken[world.rank]
    measured = [MicroBatchTiming(pipeline=0, micro_batch=i, time_s=s, peak_bytes=0) for i, s in enumerate(times_s)]
    return SimpleNamespace(number=number, plan=plan, measured=measured)


def refine_stages(taken, sent_s=(0.0, 0.0)):
    """Factors on seconds after ``EVERY`` steps in stages that took so many, of which messages were to take some."""
    world = start_world("cpu")
    cost = cost_of(world)
    cost.sent_s = lambda scheme: sent_s
    refiner = OnlineCalibration(world, cost, plan_with(world))
    for number in range(EVERY):
        refiner.on_finish(staged_step_of(world, number, taken))
    return refiner.cost.time_factors


def test_seconds_of_stages_are_set_right_by_the_slowest_one(ranks):
    assert ranks(2).run(refine_stages, [(0.5, 0.7), (1.1, 1.3)]) == [pytest.approx({1: 1.2})] * 2


def test_messages_between_stages_are_not_taken_for_computation(ranks):
    assert ranks(2).run(refine_stages, [(0.5, 0.5), (0.6, 0.5)], (0.05, 0.1)) == [{1: pytest.approx(1.1 / 1.0)}] * 2


def test_a_stage_that_did_not_compute_all_of_its_micro_batches_says_nothing(ranks):
    assert ranks(2).run(refine_stages, [(1.0, 1.0), (3.0,)]) == [{}, {}]


def refine(taken, *, with_measuring=False):
    """``EVERY`` steps in which ranks took so many seconds and bytes; factors, events, and what was measured again."""
    world = start_world("cpu")
    again = []

    def measure_again(base, degree):
        again.append(degree)
        return base

    refiner = OnlineCalibration(
        world, cost_of(world), plan_with(world), measure_again=measure_again if with_measuring else None
    )
    first = refiner.planner
    for number in range(EVERY):
        assert refiner.planner is first
        refiner.on_finish(step_of(world, number, taken))
    cost = refiner.planner.cost
    assert cost is refiner.cost
    words = [event["event"] for event in refiner.events]
    return cost.time_factors, cost.bytes_factors, words, again, refiner.planner is not first


def test_seconds_are_set_right_by_what_all_ranks_took_together(ranks):
    for times, sizes, words, _, is_changed in ranks(2).run(refine, [(1.0, 0), (1.3, 0)]):
        assert times == pytest.approx({1: 1.15}) and not sizes and is_changed
        assert words == ["degree 1 takes 1.15 times what was predicted"]


def test_a_change_that_is_not_worth_a_plan_changes_nothing(ranks):
    for times, sizes, words, _, is_changed in ranks(2).run(refine, [(1.04, 90), (0.99, 100)]):
        assert not times and not sizes and not words and not is_changed


def test_bytes_follow_the_rank_that_needed_most(ranks):
    for times, sizes, words, _, _ in ranks(2).run(refine, [(1.0, 90), (1.0, 125)]):
        assert not times and sizes == pytest.approx({1: 1.25})
        assert words == ["degree 1 needs 1.25 times the bytes that were predicted"]


def test_what_drifts_far_is_measured_again(ranks):
    for times, _, words, again, is_changed in ranks(2).run(refine, [(2.0, 0), (3.0, 0)], with_measuring=True):
        assert again == [1] and not times and is_changed
        assert words == ["degree 1 takes 2.50 times what was predicted; measuring it again"]


def test_refined_costs_are_costs_with_other_factors():
    from lengthwise.cost.corrected import CorrectedCost

    base = cost_of(SimpleNamespace(size=2))
    cost = CorrectedCost(base, time_factors={1: 2.0}, bytes_factors={2: 3.0})
    lengths = torch.tensor([5, 9]).numpy()
    assert cost.time_s([5, 9], DENSE) == pytest.approx(2 * base.time_s([5, 9], DENSE))
    assert (cost.sequence_times_s(lengths, SHARED) == base.sequence_times_s(lengths, SHARED)).all()
    assert cost.max_tokens(DENSE, num_devices=2) == base.max_tokens(DENSE, num_devices=2)
    most = cost.max_tokens(SHARED, num_devices=2)
    limit = base.memory_limit_bytes
    assert cost.peak_bytes(most, SHARED, num_devices=2) <= limit < cost.peak_bytes(most + 1, SHARED, num_devices=2)
    assert most == pytest.approx(limit / (3 / 2), rel=1e-3)  # half a byte a token, three times


def test_a_host_without_room_is_planned_around():
    cluster, spec = cluster_preset("4xH100-80GB"), model_preset("llama-3-8b")

    def plan_with(cost):
        space = SearchSpace(max_stages=1, methods=(Method.ULYSSES_Z,))
        problem = make_problem(
            cost, cluster=cluster, num_layers=spec.num_layers, max_length=100_000, search_space=space,
            samples=[np.array([100_000])],
        )  # fmt: skip
        return Planner(policy="static", problem=problem)

    watch = OnlineCalibration(
        SimpleNamespace(is_first=True), AnalyticCost(model=spec, cluster=cluster, state_on_host=True), plan_with
    )
    batch = GlobalBatch(step=3, ids=(0,), lengths=(100_000,))
    plan = watch(batch)
    assert plan.pipelines[0].scheme_of(plan.pipelines[0].micro_batches[0]).offload
    watch.refuse(plan, (MicroBatchFailure(rank=2, pipeline=0, micro_batch=0, host_bytes=1 << 30),))
    again = watch(batch)
    assert not any(p.scheme_of(m).offload for p in again.pipelines for m in p.micro_batches)
    assert "the host of rank 2 has no memory" in watch.events[-1]["event"] and not watch.cost.bytes_factors
