"""Masks of custom models are those of each sequence alone, at every degree, or the model is refused."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.adapt.own_masks import MaskTables
from lengthwise.runtime.adapt.scores import begun, noted
from lengthwise.runtime.adapt.shard import active
from tests.runtime.adapt.modules import GPT, HEADS, MASKS
from tests.runtime.adapt.runs import Case, assert_exact, learned, micro_batch_of, shard_of, step_on_ranks
from tests.runtime.adapt.test_plain_modules import IGNORES, built, gpt_losses
from tests.runtime.adapt.test_positions import DEGREES

MASKED = ("sinks", "strides", "sinks by arange", "slopes", "both ways", "window", "narrow window", "alibi")
BY_HAND = ("by hand", "filled in place", "biased")


def sums(model, tokens, targets):
    return gpt_losses(model, tokens, targets)


@pytest.mark.parametrize("mask", [*MASKED, *BY_HAND])
def test_a_mask_by_position_is_that_of_each_sequence_at_degrees_1_to_3(ranks, mask):
    case = Case(build=partial(built, GPT, num_layers=2, mask=mask), sum_of_losses=sums, **IGNORES)
    for result in ranks(3).run(step_on_ranks, case, DEGREES):
        assert_exact(case, result, mask)


def computed(model, lengths, **options):
    """The forward of a pack as a run makes it."""
    micro_batch = micro_batch_of(lengths, **options)
    with active(micro_batch.shard):
        return model(micro_batch.tokens[None])


def prepared(model):
    """Prepared, with the arguments of its forward made as a run makes them."""
    adapted = learned(model)
    make = adapted.inputs_of
    adapted.inputs_of = lambda micro_batch: {"idx": make(micro_batch)["idx"]}
    return model


@pytest.mark.parametrize(
    ("mask", "reason"),
    [("capped", "does more to its logits than to scale them"), ("scaled by length", "scales its logits by .* for 7")],
)
def test_attention_by_hand_that_is_no_scale_and_bias_by_position_is_refused(mask, reason):
    with pytest.raises(InputError, match=reason):
        learned(built(GPT, mask=mask))


def test_a_mask_that_follows_from_the_length_is_refused_when_a_sequence_is_longer():
    model = prepared(built(GPT, mask="longer is narrower"))
    computed(model, (12,))
    with pytest.raises(InputError, match="otherwise where it has 30 than where it has"):
        computed(model, (30,))


class Documents(GPT):
    """Attends within documents, which token 0 begins."""

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        document = (idx[0] == 0).cumsum(0)
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        seen = (document[:, None] == document) & torch.ones(len(document), len(document), dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=seen).transpose(1, 2).flatten(2)
        for layer in self.transformer.h:
            y = layer(y)
        return self.lm_head(y)


def test_a_mask_that_follows_from_tokens_is_refused():
    model = built(Documents)
    learned(model)  # of sequences with no token 0 but the first
    micro_batch = micro_batch_of((9, 11))
    with active(micro_batch.shard), pytest.raises(InputError, match="depends on tokens"):
        model(torch.tensor([[5, 4, 0, *[7] * 17]]))


def test_a_bias_that_is_trained_and_a_mask_too_large_to_keep_are_refused(monkeypatch):
    tables = MaskTables("Trained")
    with pytest.raises(InputError, match="adds a bias that is trained"):
        tables.note(0, torch.zeros(9, 9, requires_grad=True), (1, 4, 9, 8))
    monkeypatch.setattr("lengthwise.runtime.adapt.own_masks.MOST_NUMBERS", 4 * 8 * 8)
    tables.note(0, MASKS["slopes"](8, torch.zeros(1)), (1, 4, 8, 8))
    with pytest.raises(InputError, match="set max_length=8"):
        tables.note(0, MASKS["slopes"](9, torch.zeros(1)), (1, 4, 9, 8))
    tables.note(1, MASKS["both ways"](90, None), (1, 4, 90, 8))  # a window needs no table


def test_by_hand_what_is_trained_or_unknown_between_the_products_is_refused():
    q = torch.zeros(1, 4, 9, 8)
    scores = begun(q, q.transpose(2, 3))
    with pytest.raises(InputError, match="of what is trained, such as a bias by position"):
        noted(torch.add, (scores, torch.zeros(9, 9, requires_grad=True)), {})
    with pytest.raises(InputError, match="calls topk between its products"):
        noted(torch.topk, (scores, 3), {})
    weights = noted(torch.softmax, (scores, -1), {})
    with pytest.raises(InputError, match="calls mul between its products"):
        noted(torch.mul, (weights, 2.0), {})


def test_a_mask_of_minus_infinity_is_not_a_bias():
    shard, mask = shard_of((5,)), torch.full((5, 5), -math.inf).triu(1)
    for given in (mask, mask.clamp(torch.finfo(mask.dtype).min), mask == 0):
        tables = MaskTables("Model")
        tables.note(0, given, (1, 4, 5, 8))
        assert tables.kind(0, given, shard) == {"causal": True, "window": None}
    for given in (torch.zeros(5, 5), torch.ones(1, 1, 1, 5, dtype=torch.bool)):
        tables = MaskTables("Model")
        tables.note(0, given, (1, 4, 5, 8))
        assert tables.kind(0, given, shard) == {"causal": False, "window": None}


@pytest.mark.parametrize("mask", ["sinks", "filled"])
def test_dropout_of_masked_attention_is_the_same_for_a_sequence_in_every_pack(mask):
    model = prepared(built(GPT, mask=mask, dropout=0.3))
    together = computed(model, (9, 14))[0][0]
    assert torch.allclose(together[9:], computed(model, (14,), ids=(1,))[0][0], atol=1e-12)
