"""`prepare(shard_gradients=...)` trains what one device trains, of gradients of which each rank keeps a share."""

from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.layout import shard_size
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.session.weight_placement import shared_gradients
from tests.cost.profiled.test_dual_layer import CLUSTER
from tests.cost.profiled.test_dual_layer import table as profiled
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, train_in_parts, weights_of
from tests.session.test_prepare import EXACT, OPTIONS, STEPS, assert_equal_weights, loop_on_one_device

pytestmark = pytest.mark.usefixtures("unchecked")

SHARDED = OPTIONS | {"shard_gradients": "all", "policy": "static", "recompute": "none"}


@pytest.fixture(scope="module")
def alone():
    return loop_on_one_device()


def train_sharded(make, options):
    """Losses, degrees and weights; the parameters of each unit, and how many gradients this rank kept."""
    as_started_by_torchrun()
    model = make()
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, **options)
    losses, degrees, _ = step_through(run)
    num_kept = len(run.state.gradients)
    run.close()
    return losses, degrees, weights_of(model), run.state.table.unit_sizes, num_kept


def sparse_gpt():
    model = models.gpt()
    model.tokens.sparse = True
    return model


@pytest.mark.parametrize(
    ("num_ranks", "make"), [(2, sparse_gpt), *(pytest.param(n, models.gpt, marks=pytest.mark.deep) for n in (3, 4))]
)
def test_shares_of_gradients_train_what_one_device_trains(ranks, alone, num_ranks, make):
    """With clipping by the norm of all gradients, which has a part on every rank."""
    for losses, degrees, weights, sizes, num_kept in ranks(num_ranks).run(train_sharded, make, SHARDED):
        np.testing.assert_allclose(losses, alone[0], rtol=EXACT)
        assert_equal_weights(weights, alone[1])
        (degree,) = {degree for step in degrees for degree in step}
        assert degree > 1 and num_kept == sum(shard_size(size, degree) for size in sizes)


@pytest.mark.deep
def test_a_run_goes_on_with_other_ranks_and_other_shares_of_gradients(ranks, alone, tmp_path):
    options, found = {name: value for name, value in SHARDED.items() if name != "steps"}, []
    for num_ranks, shards, last in ((3, "all", 1), (2, "none", 2), (3, "all", STEPS)):
        losses, weights = ranks(num_ranks).run(
            train_in_parts, tmp_path, first=not found, last=last, options=options | {"shard_gradients": shards}
        )[0]
        found += losses
    np.testing.assert_allclose(found, alone[0], rtol=EXACT)
    assert_equal_weights(weights, alone[1])


def train_through(event, shards):
    """Losses and weights of a loop in which the last rank fails once in the first step, or every rank skips it."""
    as_started_by_torchrun()
    model = models.gpt()
    options = SHARDED | {"shard_gradients": shards, "steps": 2}
    run = lw.prepare(model, models.rows(), cost=SimpleCost(loss=-0.5), memory_gib=40, **options)
    due, losses = [event] if run.world.rank == run.world.size - 1 or event == "skip" else [], []

    def fails(at):
        is_due = due == [at] and run.next_step == 0
        return is_due and bool(due.clear() or True)

    def run_out(*_):
        if fails("memory"):
            raise torch.OutOfMemoryError("no memory is left")

    model.blocks[1].mlp.register_forward_pre_hook(run_out)
    while run.next_step < 2:
        with suppress(KeyError, LengthwiseError):  # of this rank, and what others are told of it
            for step in run.steps():
                if fails("skip"):
                    step.skip()
                    continue
                for micro_batch in step:
                    loss = model(**micro_batch.inputs)[1]
                    if fails("before"):
                        raise KeyError("of the loop's own")
                    step.backward(loss)
                    if fails("after"):
                        raise KeyError("of the loop's own")
                if (result := step.update()) is not None:
                    losses.append(result.loss)
                if run.next_step > 0:
                    run.score([{"input_ids": [1, 2, 3]}], lambda output, micro_batch: output[0][0, :, 0])
    run.close()
    return losses, weights_of(model)


def train_through_events():
    """With sharded gradients through each event, and what whole ones train without it, or where a step is skipped."""
    whole, skipped = train_through("", "none"), train_through("skip", "none")
    failed = [(train_through(event, "all"), whole) for event in ("memory", "before", "after")]
    return [*failed, (train_through("skip", "all"), skipped)]


def test_steps_that_fail_or_are_skipped_leave_shares_as_whole_gradients_would_be(ranks):
    for found in ranks(2).run(train_through_events):
        for (losses, weights), (whole_losses, whole_weights) in found:
            np.testing.assert_allclose(losses, whole_losses, rtol=EXACT)
            assert_equal_weights(weights, whole_weights)
        assert [len(losses) for (losses, _), _ in found] == [2, 2, 2, 1]


def read_gradients(reads, refusal):
    as_started_by_torchrun()
    model = models.gpt()
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, **SHARDED)
    step = next(iter(run.steps()))
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
    with pytest.raises(InputError, match=refusal):
        reads(model)
    run.close()


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def update(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("reads", "refusal"),
    [
        (clip, r"gradient of .* is not here: gradients are sharded.*shard_gradients='none'"),
        (update, r"SGD\.step\(\) would update .*, which step\.update\(\) updates"),
    ],
)
def test_a_loop_that_clips_or_updates_by_itself_is_refused(ranks, reads, refusal):
    ranks(2).run(read_gradients, reads, refusal)


def prepared(*, state=ShardedState, gather=None):
    return SimpleNamespace(state=object.__new__(state), gather=gather)


def test_gradients_are_sharded_where_weights_are_whole_and_asked_for():
    everything, auto = PrepareOptions(shard_gradients="all"), PrepareOptions(shard_gradients="auto")
    cost = models.mixed_cost()
    assert PrepareOptions().shard_gradients == "none"
    assert shared_gradients(prepared(), everything, cost) == "all"
    assert shared_gradients(prepared(gather=object()), everything, cost) == "none"
    assert shared_gradients(prepared(), auto, cost) == "none", "this cost lets phases shard them in different ways"
    assert shared_gradients(prepared(), auto, DualLayerCost(profiled(), cluster=CLUSTER)) == "auto"
    coupled = {"coupled_loss": sum}
    assert shared_gradients(prepared(), auto.model_copy(update=coupled), cost) == "none"
    with pytest.raises(InputError, match="shard_gradients='all', and FSDP2 shards the model"):
        shared_gradients(prepared(state=object), everything, cost)
    with pytest.raises(InputError, match="shard_gradients='all', and coupled_loss= computes"):
        shared_gradients(prepared(), everything.model_copy(update=coupled), cost)
