"""What each rank owns and updates, whatever it computes with; and that nothing of a layout outlives it."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.layout import sharded_by_unit
from lengthwise.core.pipeline_config import WeightShard
from lengthwise.runtime.models.first_weights import DrawnWeights, model_to_fill
from lengthwise.runtime.models.registry import build_model, empty_model
from lengthwise.runtime.state import sharded_weights
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from tests.runtime.parallel.cases import live_bytes
from tests.runtime.train.families import random_case, source_of
from tests.runtime.train.runs import CLIP, LR, SETTINGS, local_world, new_state
from tests.sim.random_plans import SPEC

ADAFACTOR = OptimizerSettings(name="adafactor")
EVERYTHING = WeightShard(first=0, end=SPEC.num_layers, num_layers=SPEC.num_layers)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.deep)])
@pytest.mark.parametrize("settings", [SETTINGS, ADAFACTOR], ids=lambda one: one.name)
def test_ranks_own_the_intervals_of_the_layout_and_decay_what_is_a_matrix(ranks, num_ranks, settings):
    ranks(num_ranks).run(_check_ownership, settings)


def _check_ownership(settings):
    _, state = new_state(local_world(), torch.float64, settings=settings)
    layout = state.owned_layout
    if settings == SETTINGS:
        assert layout == sharded_by_unit(state.table.bounds, state.world.size)
    held = layout.intervals[state.world.rank]
    decays = torch.zeros(state.table.num_elements, dtype=torch.bool)
    for slot in state.table.slots.values():
        decays[slice(*slot.interval)] = len(slot.shape) > 1
    expected = torch.cat([decays[:0], *(decays[start:end] for start, end in held)])
    assert decays.any() and not decays.all(), "matrices and vectors"
    found = torch.cat([torch.full((s.parameter.numel(),), s.decays) for s in state.owned.all])
    assert torch.equal(found, expected)
    for group, flag in zip(state.optimizer.param_groups, (True, False)):
        assert group["weight_decay"] == (settings.weight_decay if flag else 0.0)
        assert {id(p) for p in group["params"]} == {id(s.parameter) for s in state.owned.all if s.decays is flag}
    at = 0
    for segment in state.owned.all:
        assert segment.parameter.data_ptr() == state.master[at:].data_ptr(), "a view, in order, without gaps"
        at += segment.parameter.numel()
    assert at == len(state.master)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_first_weights_are_taken_one_at_a_time_by_the_ranks_that_own_a_share(ranks, num_ranks, dtype):
    asked = ranks(num_ranks).run(_check_first_weights, dtype)
    assert {name for names in asked for name in names} == {name for name, _ in empty_model(SPEC).named_parameters()}
    assert num_ranks == 1 or max(map(len, asked)) < len({*asked[0], *asked[1], *asked[2]})


def _check_first_weights(dtype):
    world, asked = local_world(), []
    _, expected = new_state(world, dtype)

    class Asked(DrawnWeights):
        def value(self, name):
            asked.append(name)
            return super().value(name)

    model = model_to_fill(SPEC, Asked(SPEC, seed=1), dtype=dtype, device="cpu")
    assert sum(weight.untyped_storage().nbytes() for weight in model.parameters()) < 1000
    assert all(weight.isnan().all() for weight in model.parameters())
    state = ShardedState(model, world, SETTINGS)
    assert torch.equal(state.master, expected.master)
    assert len(asked) == len(set(asked)), "none is drawn twice"
    return asked


def test_everything_can_be_held_by_all_at_once(ranks):
    ranks(3).run(_check_everything)


def _check_everything():
    model, state = new_state(local_world(), torch.float64)
    model_alone = dict(new_state(local_world(), torch.float64)[0].named_parameters())
    assert all(not weight.numel() for weight in model_alone.values()), "no weights where nothing is held"
    state.materialize_all()
    for name, weight in build_model(SPEC, dtype=torch.float64, seed=1).named_parameters():
        assert torch.equal(model.get_parameter(name), weight)


def test_gradients_of_several_backwards_add_up_at_master_precision(ranks):
    ranks(2).run(_check_accumulation)


def _check_accumulation():
    model, state = new_state(local_world(), torch.bfloat16)
    state.materialize_all()
    embedding = model.embedding
    for value in (256.0, 1.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (embedding[0, 0] * value).backward()
    assert embedding.grad is None, "what is kept is at master precision"
    assert state.gradients.dtype == torch.float32
    assert state.gradients[0].item() == 259.0
    state.finish_push()
    assert not state.gradients.any()
    if state.world.rank == 0:
        assert state.owned.all[0].parameter.grad[0].item() == 518.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_rank_that_computes_nothing_sends_and_updates_what_it_owns(ranks, dtype):
    """Also if it never computed anything before."""
    ranks(3).run(_check_idle, dtype)


def _check_idle(dtype):
    _, state = new_state(local_world(), dtype)
    before = state.master.clone()
    state.hold([None, EVERYTHING, None])
    state.pull()
    for unit in range(state.table.num_units):
        state.need(unit)
    assert (len(state.weights), state.weights.dtype) == (state.table.num_elements * (state.world.rank == 1), dtype)
    if state.world.rank == 1:
        state.gradients.fill_(1.0)
    state.finish_push()
    assert all((s.parameter.grad == 1.0).all() for s in state.owned.all)
    norm, loss = state.global_norm(torch.tensor(float(state.world.rank)))
    assert norm == pytest.approx(state.table.num_elements**0.5) and loss == 3.0
    state.step(lr=0.1, clip=1.0)
    assert (state.master != before).all()


def test_weights_follow_an_update_and_nothing_is_pulled_twice(ranks):
    ranks(2).run(_check_updated)


def _check_updated():
    model, state = new_state(local_world(), torch.float64)
    state.materialize_all()
    state.sent.clear()
    state.materialize_all()
    assert not state.sent.num_bytes, "the weights are there"
    before = model.embedding.detach().clone()
    state.gradients.fill_(1.0)
    state.finish_push()
    state.step(lr=0.1, clip=1.0)
    assert torch.equal(model.embedding, before), "until the next pull"
    state.materialize_all()
    assert (model.embedding != before).all()
    with torch.no_grad():
        state.master.fill_(7.0)
    state.forget_weights()
    state.materialize_all()
    assert (model.embedding == 7.0).all()


@pytest.mark.deep
def test_thirty_strategies_leave_as_many_bytes_as_two(ranks):
    for after_two, after_thirty in ranks(3).run(_bytes_after_strategies):
        assert after_two == after_thirty > 0


def _bytes_after_strategies():
    """All thirty are held, pulled and pushed; every tenth also trains a step."""
    world = local_world()
    model, state = new_state(world, torch.bfloat16)
    found = []
    for number in range(30):
        batch, plan = random_case(SPEC, 1 if number in (1, 29) else number, world.size)
        if number % 10 == 0 or number in (1, 29):
            run_step(plan, model, state, source_of(batch), lr=LR, clip_norm=CLIP, clock=StepClock(world))
        else:
            state.hold(plan.holdings(0))
            state.pull()
            state.finish_push()
        if number in (1, 29):
            found.append(live_bytes())
    return found


@pytest.mark.parametrize("most", [8, pytest.param(sharded_weights.MAX_ROUTES, marks=pytest.mark.deep)])
def test_only_so_many_routes_are_remembered_and_forgotten_ones_are_found_again(ranks, most):
    ranks(4).run(_check_routes, most)


def _check_routes(most):
    with mock.patch.object(sharded_weights, "MAX_ROUTES", most):
        _check_most_routes(most)


def _check_most_routes(most):
    world, rng = local_world(), random.Random(3)
    _, state = new_state(world, torch.float64)
    seen = []
    while len(set(seen)) <= most + 10:
        seen.append(random_case(SPEC, rng.randrange(10**6), world.size)[1].holdings(0))
        state.hold(seen[-1])
        assert len(state._routes) == min(len(set(seen)), most)
    newest = [holdings for _, holdings in state._routes]
    assert newest == list(dict.fromkeys(reversed(seen)))[:most][::-1], "the least recently used go first"
    state.hold(next(one for one in seen if one not in newest))
    state.pull()
    state.finish_push()
    held = state.table.parts(state.holdings[world.rank])
    assert sum(part.interval[1] - part.interval[0] for part in held) == len(state.weights)


@pytest.mark.deep
def test_groups_are_made_once_for_each_set_of_ranks(ranks):
    ranks(4).run(_check_groups)


def _check_groups():
    world, made = replace(local_world()), {}
    model, state = new_state(world, torch.float64)
    original = dist.new_group

    def new_group(ranks, **options):
        handle = original(ranks, **options)
        made.setdefault(tuple(ranks), []).append(handle)
        return handle

    with mock.patch.object(dist, "new_group", new_group):
        counts = []
        for seed in (*range(6), *range(6)):
            batch, plan = random_case(SPEC, seed, world.size)
            run_step(plan, model, state, source_of(batch), lr=LR, clip_norm=CLIP, clock=StepClock(world))
            counts.append(sum(map(len, made.values())))
    assert counts[-1] == counts[5] > 3, "a strategy that comes back finds its groups"
    assert max(map(len, made.values())) <= 4, "one for a stage, one for its gradients, one each way for a pipeline"
    for handle in (handle for handles in made.values() for handle in handles):
        if handle != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(handle)
