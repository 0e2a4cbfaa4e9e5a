"""A rank that runs out of memory in a micro-batch of its own: all leave the step, and it is planned again."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lengthwise.config.run_config import check
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.specs import cluster_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.runtime.comm.activation_offload import HostOffload
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.training_engine import TransformerEngine
from lengthwise.session.online_calibration import OnlineCalibration
from tests.runtime.train.runs import RandomTokens, local_world, master_weights
from tests.sim.random_plans import SPEC

LENGTHS = (20, 18, 17, 15, 14, 12, 9, 5)
ROOM = 22
"""Tokens of a micro-batch that fit a rank."""
CLUSTER = cluster_preset("2xcpu")
COST = AnalyticCost(model=SPEC, cluster=CLUSTER, dtype="float32")


def planner_of(cost, token_limit=60, degree=1):
    problem = make_problem(
        cost,
        cluster=CLUSTER,
        num_layers=SPEC.num_layers,
        max_length=max(LENGTHS),
        search_space=SearchSpace(degree=degree, max_stages=1),
        token_limit=token_limit,
    )
    return Planner(policy="packed", problem=problem)


def make_engine(on_oom=None):
    world = local_world()
    config = check({"train": {"dtype": "float64"}, "optim": {"lr": 1e-2}, "data": {"prefetch": 2}})
    source = RandomTokens(dict(enumerate(LENGTHS)))
    model = build_model(SPEC, dtype=torch.float64, seed=1)
    return TransformerEngine(model, world, config=config, spec=SPEC, source=source, on_oom=on_oom), world


def limit_room(engine, rank, *, in_backward):
    """On ``rank``, micro-batches of more than ``ROOM`` tokens run out of memory."""
    run, is_limited = engine.model.run, engine.world.rank == rank

    def limited(execution, *inputs):
        tokens_T = getattr(execution, "tokens_T", None)  # where ranks share them, none fits
        fits = not is_limited or (tokens_T is not None and len(tokens_T) <= ROOM)
        if not fits and not in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory")
        output = run(execution, *inputs)
        if not fits:
            output.register_hook(lambda gradient: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
        return output

    engine.model.run = limited


def batch_of(step=0):
    return GlobalBatch(step=step, ids=tuple(range(len(LENGTHS))), lengths=LENGTHS)


def compute(engine, world, plan):
    engine.read_ahead(plan, None)
    return engine.compute_step(plan, StepClock(world), lr=1e-2)


def replanned(in_backward):
    failed = []
    engine, world = make_engine(on_oom=lambda plan, failures: failed.append(failures))
    limit_room(engine, rank=1, in_backward=in_backward)
    engine.begin()
    before = master_weights(engine.state)
    plan = planner_of(COST)(batch_of())
    assert max(m.pack.num_tokens for p in plan.pipelines for m in p.micro_batches) > ROOM
    assert compute(engine, world, plan) is None
    kept = all(torch.equal(weight, before[name]) for name, weight in master_weights(engine.state).items())
    result = compute(engine, world, planner_of(COST, ROOM)(batch_of()))
    engine.close()
    places = [(f.rank, plan.pipelines[f.pipeline].ranks) for failures in failed for f in failures]
    return places, kept, result.loss, master_weights(engine.state)


def without_room_on_the_host():
    failed = []
    engine, world = make_engine(on_oom=lambda plan, failures: failed.append(failures))
    vars(world)["offload"] = HostOffload(world.device, limit_bytes=0 if world.rank == 1 else None)
    try:
        engine.begin()
        plan = planner_of(COST, ROOM)(batch_of())
        pipelines = [replace(p, scheme=replace(p.scheme, offload=(True,) * SPEC.num_layers)) for p in plan.pipelines]
        assert compute(engine, world, replace(plan, pipelines=tuple(pipelines))) is None
        result = compute(engine, world, plan)
    finally:
        del vars(world)["offload"]  # other tests of this process have the same world
    engine.close()
    return (
        [(f.rank, f.host_bytes > 0) for failures in failed for f in failures],
        result.loss,
        master_weights(engine.state),
    )


def test_a_step_that_has_no_room_for_activations_on_the_host_is_planned_again(ranks):
    loss, expected = ranks(2).run(whole)[0]
    for places, again, weights in ranks(2).run(without_room_on_the_host):
        assert (places, again) == ([(1, True)], loss)
        assert all(torch.equal(weight, weights[name]) for name, weight in expected.items())


def whole():
    engine, world = make_engine()
    engine.begin()
    result = compute(engine, world, planner_of(COST, ROOM)(batch_of()))
    engine.close()
    return result.loss, master_weights(engine.state)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_step_that_ran_out_of_memory_leaves_no_trace_and_comes_again(ranks, in_backward):
    loss, expected = ranks(2).run(whole)[0]
    for places, kept, found, weights in ranks(2).run(replanned, in_backward):
        assert places == [(1, (1,))], "both ranks hear where it was"
        assert kept and found == loss
        for name, weight in expected.items():
            assert torch.equal(weight, weights[name]), name


def without_end():
    engine, world = make_engine()
    limit_room(engine, rank=0, in_backward=False)
    with pytest.raises(InfeasibleError, match=r"step 0: rank 0 ran out of memory in a micro-batch of \d+ tokens under"):
        compute(engine, world, planner_of(COST)(batch_of()))


def test_where_nothing_plans_a_step_again_all_ranks_end_with_the_reason(ranks):
    ranks(2).run(without_end)


def together():
    engine, world = make_engine(on_oom=lambda plan, failures: None)
    limit_room(engine, rank=world.rank, in_backward=False)  # all ranks, so that none waits for another
    with pytest.raises(InfeasibleError, match=r"under scheme <2,1> .*; lower .*max_tokens"):
        compute(engine, world, planner_of(COST, degree=2)(batch_of()))
    engine.state.finish_pull()


def test_where_ranks_share_what_does_not_fit_the_run_ends_with_the_scheme_and_the_way_out(ranks):
    ranks(2).run(together)


def refused():
    engine, world = make_engine()
    calibration = OnlineCalibration(world, COST, planner_of)
    failed = []
    engine._on_oom = lambda plan, failures: (failed.append(plan), calibration.refuse(plan, failures))
    limit_room(engine, rank=1, in_backward=False)
    while (result := compute(engine, world, calibration(batch_of()))) is None:
        pass
    return len(failed), bool(np.isfinite(result.loss))


def test_costs_that_refuse_what_failed_plan_the_step_smaller_until_it_fits(ranks):
    for num_failed, is_finite in ranks(2).run(refused):
        assert 1 <= num_failed <= 5 and is_finite
