"""Steps that must not run, and steps that must not change anything."""

import math
import random
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline
from lengthwise.runtime.train import execute_step as step
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.executable import check_executable
from lengthwise.runtime.train.execute_step import StepConsensus, StepResult, run_step, sync_step
from lengthwise.sim.schedule_check import operations
from tests.runtime.train.runs import RandomTokens, local_world, new_state
from tests.sim.random_plans import SPEC, random_batch, random_plan


def example(num_ranks=2):
    rng = random.Random(0)
    batch = random_batch(rng, 0)
    return batch, random_plan(rng, batch, num_ranks)


def test_plans_for_another_world_are_refused():
    with pytest.raises(InputError, match="plan for step 0 is for 2 ranks, the run has 3; plan again for 3"):
        check_executable(example()[1], SPEC, 3)


def test_any_plan_for_these_ranks_and_this_model_is_executable():
    for num_ranks in (1, 3, 8):
        check_executable(example(num_ranks)[1], SPEC, num_ranks)


def pipeline(ranks, degree, method, *, num_layers=SPEC.num_layers, overrides=None):
    scheme = uniform_scheme(num_layers, degree=degree, method=method)
    pack = Pack(ids=(0,), lengths=(9,))
    micro_batch = PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1, methods=overrides)
    return Pipeline(ranks=ranks, scheme=scheme, micro_batches=(micro_batch,))


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (pipeline((1, 2, 3), 3, Method.RING, num_layers=5), r"stage_layers=\(5,\) hold 5 layers, model test has 4"),
        (
            pipeline((1, 2, 3), 3, Method.MEGATRON_TS),
            "megatron_ts at degree 3 needs as many key/value heads, model test has 2; choose a lower degree",
        ),
        (
            pipeline((1, 2, 3), 3, Method.METP, overrides=(Method.METP,) * 3 + (Method.MEGATRON_TS,)),
            "megatron_ts at degree 3 needs as many key/value heads",
        ),
    ],
    ids=["another model", "too few heads", "too few heads in one layer of one micro-batch"],
)
def test_plans_that_do_not_fit_the_model_name_the_field(last, message):
    plan = replace(example(4)[1], pipelines=(pipeline((0,), 1, Method.DENSE), last))
    with pytest.raises(InputError, match=rf"pipelines\[1\]\.scheme.*{message}"):
        check_executable(plan, SPEC, 4)


def test_ranks_with_different_plans_stop_before_they_hang(ranks):
    ranks(3).run(_check_disagreement)


def _check_disagreement():
    world = local_world()
    plan = example(3)[1]
    assert sync_step(plan, world, StepClock(world), stop=False) == StepConsensus(stop=False, save_failed=False)
    if world.rank == 2:
        plan = replace(plan, lr_factor=0.5)
    with pytest.raises(CheckError, match=r"rank 2 plans [0-9a-f]{16}, rank 0 plans"):
        sync_step(plan, world, StepClock(world), stop=False)


def test_clocks_begin_with_the_rank_that_started_last_and_any_digest_is_told(monkeypatch):
    other = torch.tensor([-(1 << 63), 0, 0, 3_000_000_000])
    monkeypatch.setattr(step, "gather_rows", lambda row: torch.stack([row, other]))
    clock = mock.Mock(**{"since_start_s.return_value": 2.0})
    plan, world = mock.Mock(step=3, digest="f" * 16), mock.Mock(device=torch.device("cpu"))
    with pytest.raises(CheckError, match=f"^step 3: rank 1 plans {'0' * 16}, rank 0 plans {'f' * 16};"):
        sync_step(plan, world, clock, stop=False)
    clock.align.assert_called_once_with(3.0)
    other[3] = 1_000_000_000
    with pytest.raises(CheckError):
        sync_step(plan, world, clock, stop=False)
    clock.align.assert_called_with(2.0)


def test_what_one_rank_knows_all_know(ranks):
    """That it was asked to stop; that a checkpoint could not be written."""
    for agreed in ranks(3).run(_agree_on_what_rank_one_knows):
        assert agreed == [StepConsensus(stop=True, save_failed=False), StepConsensus(stop=False, save_failed=True)]


def _agree_on_what_rank_one_knows():
    world = local_world()
    plan, is_told = example(3)[1], world.rank == 1
    return [
        sync_step(plan, world, StepClock(world), stop=is_told),
        sync_step(plan, world, StepClock(world), stop=False, save_failed=is_told),
    ]


def test_a_loss_that_is_not_finite_stops_every_rank_with_weights_unchanged(ranks):
    ranks(2).run(_check_not_finite)


def _check_not_finite():
    world = local_world()
    batch, plan = example()
    model, state = new_state(world, torch.float64)
    if world.rank == 1:
        state.master[0] = math.inf  # of what it owns of the embedding
    before = state.master.clone()
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
    for _ in range(2):
        with pytest.raises(LengthwiseError, match=r"step 0: loss .*not both finite; weights are unchanged since"):
            run_step(plan, model, state, source, lr=0.1, clip_norm=1.0, clock=StepClock(world))
    assert torch.equal(before, state.master)
    assert state.optimizer is not None and not state.optimizer.state, "nor has the optimizer seen the step"


def test_a_step_whose_operations_do_not_match_is_refused_before_anything_moves(ranks):
    ranks(2).run(_check_refused)


def _check_refused():
    world = local_world()
    batch, plan = example()
    model, state = new_state(world, torch.float64)
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))

    def without_a_push(*arguments, **options):
        return [(stretch, (lists[0][:-1], *lists[1:])) for stretch, lists in operations(*arguments, **options)]

    run = partial(run_step, plan, model, state, source, lr=0.1, clip_norm=1.0, clock=StepClock(world))
    with (
        mock.patch.object(step, "operations", without_a_push),
        pytest.raises(CheckError, match=r"step 0 is not run, .* rank 0 would do nothing more"),
    ):
        run()
    assert not state.sent.calls
    assert math.isfinite(run().loss)


def test_a_result_prints_as_a_line_of_figures():
    assert str(StepResult(loss=2.34567, grad_norm=1.0, lr=3e-4)) == "loss 2.3457, gradient norm 1, learning rate 0.0003"
