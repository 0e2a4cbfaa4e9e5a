"""float16: losses scaled as torch.amp.GradScaler scales them, steps that overflow skipped on all ranks, 16-bit sums."""

import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.cost.memory_model import state_parts
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.loss_scaler import BACKOFF, GROWTH, LEAST_SCALE, MOST_SCALE, LossScaler
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import DivergedError, run_micro_batches, run_step
from tests.runtime.state.saved import assert_same_tensors, train, whole_contents
from tests.runtime.train.runs import (
    CLIP,
    LR,
    SETTINGS,
    RandomTokens,
    local_world,
    master_weights,
    new_state,
    train_on_ranks,
    whole_batch_loss,
)
from tests.sim.random_plans import SPEC, random_batch, random_plan

SCALED = replace(SETTINGS, loss_scale=1024.0, loss_scale_window=2)
NARROW = replace(SETTINGS, narrow_gradients=True)
UNIT = 2.0**-11
"""Relative error of one rounding to float16."""
NUM_ROUNDINGS = 2 * 20 * SPEC.num_layers
"""Rounded results, one after the other, of a forward and backward: about 20 a layer (two norms, six products, rotary
positions, attention's two products, gate and two sums) in each."""
FEW_SUMS = 12
"""Gradients of micro-batches, layers of ties and ranks that are added up in float16."""
VANISHING = 2.0**22
"""What losses are divided by, so that gradients are below the smallest number of float16, 6e-8."""


@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 1.0])
def test_scales_are_those_of_torch_step_by_step(share):
    rng, scaler = random.Random(1), LossScaler(2.0**10, growth_interval=3)
    scale, growth = torch.tensor([2.0**10]), torch.tensor([0], dtype=torch.int32)
    skipped = 0
    for _ in range(60):
        has_overflowed = rng.random() < share
        torch._amp_update_scale_(scale, growth, torch.tensor([float(has_overflowed)]), GROWTH, BACKOFF, 3)
        scaler.update(has_overflowed=has_overflowed)
        skipped += has_overflowed
        assert (scaler.scale, scaler.num_good, scaler.num_skipped) == (float(scale), int(growth), skipped)


def test_a_scale_never_grows_beyond_what_float32_holds():
    scaler = LossScaler(2.0**127, growth_interval=1)
    scaler.update(has_overflowed=False)
    assert scaler.scale == 2.0**127 < MOST_SCALE


def test_losses_of_models_in_float16_are_scaled_and_others_where_it_is_asked_for():
    scaler = LossScaler.of(SETTINGS, torch.float16)
    assert scaler is not None and (scaler.scale, scaler.growth_interval) == (65536.0, 2000)
    assert LossScaler.of(SETTINGS, torch.bfloat16) is None
    asked = LossScaler.of(SCALED, torch.bfloat16)
    assert asked is not None and (asked.scale, asked.growth_interval) == (1024.0, 2)


def test_scaled_losses_change_no_bit_under_any_plan(ranks):
    for plain, scaled in zip(*(ranks(2).run(train_on_ranks, 3, 4, torch.float64, s) for s in (SETTINGS, SCALED))):
        assert plain[0] == scaled[0]
        for name, weights in plain[1].items():
            assert torch.equal(weights, scaled[1][name]), name


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_in_float16_are_those_of_float64_within_the_roundings_of_a_pass(ranks, num_ranks):
    for error in ranks(num_ranks).run(_errors, seeds=(1, 2), settings=SETTINGS):
        assert error < NUM_ROUNDINGS * UNIT


def test_gradients_summed_in_float16_are_those_of_float64_within_as_many_roundings_more(ranks):
    for error in ranks(3).run(_errors, seeds=(1, 2), settings=NARROW):
        assert error < (NUM_ROUNDINGS + FEW_SUMS) * UNIT


def test_gradients_in_float16_vanish_without_a_loss_scale_and_are_there_with_one(ranks):
    (lost,) = ranks(1).run(_errors, seeds=(1,), settings=replace(SETTINGS, loss_scale=1.0), divided_by=VANISHING)
    (kept,) = ranks(1).run(_errors, seeds=(1,), settings=SETTINGS, divided_by=VANISHING)
    assert lost > 0.1 and kept < NUM_ROUNDINGS * UNIT


def _errors(seeds, settings, divided_by=1.0):
    """The largest relative distance of whole gradients from those of one device in float64."""
    worst = 0.0
    for seed in seeds:
        rng, world = random.Random(seed), local_world()
        batch = random_batch(rng, seed)
        plan = random_plan(rng, batch, world.size)
        plan = replace(plan, loss_normaliser=plan.loss_normaliser * divided_by)
        reference = build_model(SPEC, dtype=torch.float64, seed=1)
        weights = build_model(SPEC, dtype=torch.float16, seed=1).state_dict()
        reference.load_state_dict({name: value.double() for name, value in weights.items()})
        whole_batch_loss(reference, batch).backward()
        model, state = new_state(world, torch.float16, settings=settings)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        run_micro_batches(plan, model, state, source, clock=StepClock(world))
        pushed = torch.cat([state.master[:0], *(s.pushed.flatten().to(state.master_dtype) for s in state.owned.all)])
        state.master.copy_(pushed / state.loss_scaler.scale * divided_by)
        found, expected = master_weights(state), {name: p.grad for name, p in reference.named_parameters()}
        ours, theirs = (torch.cat([values[name].flatten() for name in expected]) for values in (found, expected))
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    return worst


def _overflow_on(rank, state):
    """Let one rank's next gradient overflow, once."""
    finish_push = state.finish_push

    def spoil_and_push():
        state.finish_push = finish_push
        if state.world.rank == rank:
            assert state.gradients.numel(), "the plan has this rank compute"
            state.gradients[0] = inf
        finish_push()

    state.finish_push = spoil_and_push


@pytest.mark.parametrize(
    "settings",
    [SCALED, pytest.param(replace(SCALED, narrow_gradients=True), marks=pytest.mark.deep)],
    ids=["master", "compute"],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks_and_training_goes_on(ranks, settings):
    ranks(2).run(_check_skip, settings)


def _check_skip(settings):
    model, state = new_state(local_world(), torch.bfloat16, settings=settings)
    other_model, other = new_state(local_world(), torch.bfloat16, settings=settings)
    before = state.master.clone()
    _overflow_on(1, state)
    results = [_step(model, state, 0), _step(model, state, 1)]
    assert [r.is_skipped for r in results] == [True, False]
    assert [(r.loss_scale, r.num_skipped) for r in results] == [(1024.0, 1), (512.0, 1)]
    assert results[0].grad_norm == inf and not torch.equal(before, state.master)
    other.loss_scaler.scale = 512.0
    assert _step(other_model, other, 1).loss == results[1].loss
    assert torch.equal(state.master, other.master), "a skipped step leaves no trace"


def _step(model, state, number):
    rng = random.Random(number)
    batch = random_batch(rng, number)
    plan = random_plan(rng, batch, state.world.size)
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
    return run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=StepClock(state.world))


def test_what_no_lower_scale_cures_ends_the_run(ranks):
    ranks(2).run(_check_divergence)


def _check_divergence():
    model, state = new_state(local_world(), torch.bfloat16, settings=replace(SETTINGS, loss_scale=LEAST_SCALE))
    before = state.master.clone()
    _overflow_on(1, state)
    with pytest.raises(DivergedError, match="gradient norm inf"):
        _step(model, state, 0)
    assert torch.equal(before, state.master)


def test_a_resumed_run_has_the_scale_and_the_updates_of_the_saved_one_to_the_bit(ranks, tmp_path):
    ranks(2).run(_check_resume, str(tmp_path))


def _check_resume(path):
    model, state = new_state(local_world(), torch.bfloat16, settings=SCALED)
    _overflow_on(1, state)
    train(model, state, first=0, steps=4)
    checkpoint.save(Path(path), state, {"step": 4, "sampler": {}}, keep=1)
    other_model, other = new_state(local_world(), torch.bfloat16, settings=SCALED)
    checkpoint.load(checkpoint.latest(Path(path)), other)
    assert other.loss_scaler.state_dict() == state.loss_scaler.state_dict() == {
        "scale": 1024.0, "num_good": 1, "num_skipped": 1,
    }  # fmt: skip
    assert train(other_model, other, first=4, steps=2) == train(model, state, first=4, steps=2)
    assert_same_tensors(whole_contents(other), whole_contents(state))


@pytest.mark.parametrize("settings", [OptimizerSettings(), OptimizerSettings(name="adafactor")], ids=lambda s: s.name)
def test_one_micro_batch_on_one_rank_is_summed_in_16_bits_without_an_error(ranks, settings):
    """There is nothing to add, so that only the way of the update differs."""
    narrow = replace(settings, narrow_gradients=True)
    for wide, other in zip(*(ranks(1).run(_train_alone, s) for s in (settings, narrow))):
        assert all(torch.equal(weights, other[name]) for name, weights in wide.items())


def _train_alone(settings):
    model, state = new_state(local_world(), torch.bfloat16, settings=settings)
    for number in range(3):
        batch = random_batch(random.Random(number), number)
        pack = Pack(ids=batch.ids, lengths=batch.lengths)  # no tiles, whose gradients are added up one by one
        pipeline = Pipeline(
            ranks=(0,), scheme=dense_scheme(SPEC.num_layers),
            micro_batches=(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1),),
        )  # fmt: skip
        plan = StepPlan(
            step=number, policy="one", pipelines=(pipeline,), loss_normaliser=max(1, batch.num_targets), update_s=0.0,
            time_s=1.0, lower_bound_s=1.0, num_devices=1,
        )  # fmt: skip
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=StepClock(state.world))
    return master_weights(state)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("settings", [SETTINGS, NARROW], ids=["master", "compute"])
def test_the_memory_model_knows_the_bytes_of_the_state(ranks, settings, num_ranks):
    for weights, gradients in ranks(num_ranks).run(_bytes_of_state, settings):
        expected = state_parts(SPEC, num_devices=num_ranks, dtype="float16", narrow_gradients=settings.narrow_gradients)
        assert (weights, gradients) == pytest.approx(expected[:2], rel=0.01)  # shards of units are padded


def _bytes_of_state(settings):
    _, state = new_state(local_world(), torch.float16, settings=settings)
    state.materialize_all()
    assert state.pushed.element_size() == (2 if settings.narrow_gradients else 4)
    return state.weights.nbytes, state.gradients.nbytes
