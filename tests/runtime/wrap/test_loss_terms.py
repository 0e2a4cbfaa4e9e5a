"""Means over a step count slots, targets and sequences, and no padding."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lengthwise.core.batch import EVERY_TOKEN, GlobalBatch, Pack
from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.collator import PackCollator, pad_to_degree
from lengthwise.runtime.wrap.loss_check import LossCheck, NotedLoss
from lengthwise.runtime.wrap.loss_terms import LossTotals
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from tests.runtime.loop.modules import CHANNELS, PLACES
from tests.runtime.loop.runs import Frames, Packs, Source, plan_of, shard_of


def micro_batch_of(pack, collator, ids):
    lengths = tuple(end - start for start, end in pairwise(collator.cu_seqlens(pack)))
    return MicroBatch(shard_of(lengths, ids=ids), pack, collator, make_inputs=lambda micro_batch: {})


def test_padding_is_in_no_mean():
    collator = PackCollator(source=Source((9, 1, 3)), objective="next-token")
    micro_batch = micro_batch_of(pad_to_degree(Pack(ids=(1, 2), lengths=(1, 3)), 5, collator), collator, (1, -1, 2, -1))
    none = 100.0
    values = torch.tensor([[2.0, *[none] * 4, 3.0, 4.0, 8.0, none, none]], dtype=torch.float64)
    assert float(micro_batch.mean(values, over="tokens")) == pytest.approx((2 + 3 + 4 + 8) / 4)
    assert float(micro_batch.mean(values, over="sequences")) == pytest.approx((2 + 5) / 2)
    assert float(micro_batch.mean(values, over="targets")) == pytest.approx((3 + 4) / 4), "of all tokens, as planned"


def test_means_over_slots_of_several_tokens_are_over_slots():
    source = Frames((4, 2), PLACES, CHANNELS)
    collator = PackCollator(source=source, objective=EVERY_TOKEN, slot_tokens=PLACES)
    micro_batch = micro_batch_of(Pack(ids=(0, 1), lengths=source.lengths), collator, (0, 1))
    values = torch.tensor([1.0, 2, 3, 4, 10, 20], dtype=torch.float64)
    assert float(micro_batch.mean(values, over="targets")) == pytest.approx(40 / 6)
    assert float(micro_batch.mean(values, over="tokens")) == pytest.approx(40 / 6)
    assert float(micro_batch.mean(values, over="sequences")) == pytest.approx((2.5 + 15) / 2)
    batch = GlobalBatch(step=0, ids=(0, 1), lengths=source.lengths, objective=EVERY_TOKEN)
    plan = plan_of(batch, (Packs(ranks=(0,), packs=((0,), (1,))),), 1)
    totals = LossTotals.of(plan, collator, targets=None)
    assert (totals.targets, totals.slots, totals.sequences, totals.units) == (6 * PLACES, 6, 2, 2)


def test_a_loss_over_no_target_is_compared_with_nothing():
    """A loop may clamp the count that it divides by, where the model divides 0 by 0."""
    noted = NotedLoss(torch.tensor(float("nan")), None)
    shard = shard_of((2, 3), ids=(0, 1))
    shard.passes.append(SimpleNamespace(noted=noted, num_other_targets=None))
    loss = torch.zeros((), requires_grad=True) * 2.0
    wrapped_model = SimpleNamespace(has_own_loss=False, ignored_labels=set(), deferred_parameters=())
    LossCheck().check(loss, wrapped_model, SimpleNamespace(shard=shard, num_targets=0, has_all_targets=False))
    with pytest.raises(CheckError, match="got a loss of 0"):
        LossCheck().check(loss, wrapped_model, SimpleNamespace(shard=shard, num_targets=3, has_all_targets=False))


@pytest.mark.parametrize("num_sequences", [3, 2], ids=["no padding", "padding"])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_slots_that_are_no_padding_are_counted_on_the_host(degree, num_sequences):
    shards = [shard_of((5, 2, 4), rank=rank, degree=degree, ids=tuple(range(num_sequences))) for rank in range(degree)]
    assert [shard.num_unpadded for shard in shards] == [int((shard.sequences >= 0).sum()) for shard in shards]
    assert sum(shard.num_unpadded for shard in shards) == (11 if num_sequences == 3 else 7)
