"""Gradients that ranks reduce to shares in every backward: what is kept and sent, and what is the same bit for bit.

That they are those of one device under any plan is what the random plans of ``tests/runtime/train`` show, which shard
gradients in half of the pipelines that can.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.layout import shard_size
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.runtime.state.gradient_shares import GRADIENT_SHARES, GradientShares
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_micro_batches
from tests.runtime.train.families import FAMILIES, assert_as_on_one_device, run_plan, source_of
from tests.runtime.train.runs import local_world, new_state
from tests.runtime.train.test_execute_pipeline import plan_of
from tests.sim.random_plans import SPEC

BATCH = GlobalBatch(step=0, ids=(0, 1, 2, 3, 4), lengths=(9, 4, 7, 1, 12))


def scheme(degree, stages=1, shards=True):
    whole = uniform_scheme(SPEC.num_layers, degree=degree, stages=stages, method=Method.RING, recomputed=2)
    return replace(whole, shard_gradients=shards)


def lanes(shards):
    """Three ranks of one pipeline with three micro-batches beside one rank with one."""
    dense = uniform_scheme(SPEC.num_layers)
    return ((1, 3, 0), scheme(3, shards=shards), ((0,), (1, 2), (3,)), 0), ((2,), dense, ((4,),), 0)


def test_ranks_keep_a_share_of_each_unit_and_two_units_whole(ranks):
    found = ranks(4).run(kept_and_sent)
    for rank, (kept, share, most_whole, sent) in enumerate(found):
        if rank == 2:
            assert (kept, most_whole, sent) == (share, 0, 0), "it keeps all that it computes with"
            continue
        assert kept == share
        assert most_whole == 2
        assert sent == 3 * 2 * share * 8, "to two others a share each, in three micro-batches, float64"


def kept_and_sent():
    """Elements kept, those of a share of each unit, the most units that were whole at once, and bytes reduced."""
    world, plan = local_world(), plan_of(BATCH, *lanes(shards=True))
    model, state = new_state(world, torch.float64)
    most, reduce = [0], GradientShares._reduce

    def counted(self, unit, whole):
        most.append(1 + len(self._whole) + len(self._under_way))
        reduce(self, unit, whole)

    with mock.patch.object(GradientShares, "_reduce", counted):
        run_micro_batches(plan, model, state, source_of(BATCH), clock=StepClock(world))
    num_shares = 1 if world.rank == 2 else 3
    share = sum(shard_size(size, num_shares) for size in state.table.unit_sizes)
    group = world.groups.of((0, 1, 3), GRADIENT_SHARES)
    sent = 0 if group is None else group.sent.num_bytes["reduce_scatter"]
    assert not state.gradients.any() and all(p.grad is None or not p.grad.any() for p in model.parameters())
    return len(state.gradients), share, max(most), sent


def test_one_micro_batch_of_one_pipeline_is_summed_to_the_last_bit_as_without(ranks):
    ranks(3).run(_check_same_bits)


def _check_same_bits():
    plans = [plan_of(BATCH, ((2, 0, 1), scheme(3, shards=shards), (range(5),), 0)) for shards in (True, False)]
    (loss, sharded), (same_loss, whole) = (run_plan(SPEC, BATCH, plan) for plan in plans)
    assert loss == same_loss and all(torch.equal(sharded[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.deep] * (n != "tied llama")) for n in FAMILIES],
)
def test_phases_may_keep_other_gradients_of_the_same_weights(ranks, name):
    """Stages of two with shares, then one rank each, then shares of four; of weights that are tied too."""
    ranks(4).run(_check_phases, name)


def _check_phases(name):
    spec = FAMILIES[name]
    batch = replace(BATCH, objective=spec.objective)
    dense = uniform_scheme(spec.num_layers)
    plan = plan_of(
        batch,
        ((0, 1, 3, 2), scheme(2, 2), ((0,), (1,)), 0),
        *(((rank,), dense, ((2,),) if rank == 1 else (), 1) for rank in range(4)),
        ((3, 1, 0, 2), scheme(4), ((3,), (4,)), 2),
    )
    assert_as_on_one_device(spec, batch, run_plan(spec, batch, plan))
