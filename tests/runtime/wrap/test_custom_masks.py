"""Masks of custom models are those of each sequence alone, at every degree, or the model is refused."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.custom_masks import MaskTables
from lengthwise.runtime.wrap.manual_attention import begin_scores, begin_scores_with_bias, record_operation
from tests.runtime.loop.modules import BY_HAND as MASKED_BY_HAND
from tests.runtime.loop.modules import GPT, HEADS, MASKS, filled, slopes
from tests.runtime.loop.runs import (
    LENGTHS,
    Case,
    Packs,
    assert_exact,
    learned,
    micro_batch_of,
    packed,
    shard_of,
    step_on_ranks,
)
from tests.runtime.loop.test_plain_modules import IGNORES, built, gpt_losses
from tests.runtime.wrap.test_position_ids import DEGREES

MASKED = ("sinks", "strides", "sinks by arange", "slopes", "both ways", "window", "narrow window", "alibi")
BY_HAND = ("by hand", "filled in place", "biased")
QUICK = ("alibi", "biased")


LONG = (Packs(ranks=(0,), packs=((5, 2, 9), (0, 1, 3, 4, 6, 7, 8)), recompute=(True, False)),)
"""The first has 68 slots, more than any table of the model."""


def sums(model, tokens, targets):
    return gpt_losses(model, tokens, targets)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "mask",
    # Others say the same by other operations.
    [pytest.param(m, marks=[pytest.mark.deep] * (m not in QUICK)) for m in (*MASKED, *BY_HAND)],
)
def test_a_mask_by_position_is_that_of_each_sequence_at_degrees_1_to_3(ranks, mask):
    case = Case(build=partial(built, GPT, num_layers=2, mask=mask), sum_of_losses=sums, **IGNORES)
    for result in ranks(3).run(step_on_ranks, case, DEGREES):
        assert_exact(case, result, mask)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "mask", ["buffer", "biased", *(pytest.param(m, marks=pytest.mark.deep) for m in BY_HAND if m != "biased")]
)
def test_a_pack_may_be_longer_than_the_table_of_a_mask(ranks, mask):
    assert sum(LENGTHS[number] for number in LONG[0].packs[0]) > len(GPT().transformer.h[0].attn.tril[0, 0])
    case = Case(build=partial(built, GPT, num_layers=2, mask=mask), sum_of_losses=sums, **IGNORES)
    for result in ranks(1).run(step_on_ranks, case, LONG):
        assert_exact(case, result, mask)


def computed(model, lengths, **options):
    """The forward of a pack as a run makes it."""
    micro_batch = micro_batch_of(lengths, **options)
    with active(micro_batch.shard):
        return model(micro_batch.tokens[None])


def prepared(model):
    """Prepared, with the arguments of its forward made as a run makes them."""
    wrapped_model = learned(model)
    make = wrapped_model.inputs_of
    wrapped_model.inputs_of = lambda micro_batch: {"idx": make(micro_batch)["idx"]}
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


def narrow_between(t, x):
    """Of 15 to 25 slots narrower than of fewer and of more."""
    return torch.ones(t, t, dtype=torch.bool).tril().triu(-4 if 15 < t < 25 else -40)


def test_a_mask_that_follows_from_the_length_is_refused_between_lengths_that_agree(monkeypatch):
    monkeypatch.setitem(MASKS, "narrow between", narrow_between)
    model = prepared(built(GPT, mask="narrow between"))
    computed(model, (40,))
    with pytest.raises(InputError, match="otherwise where it has 40 than where it has 20"):
        computed(model, (20,))


def test_a_mask_of_more_slots_than_were_seen_is_refused():
    model = built(GPT, mask="sinks")
    learned(model)
    with pytest.raises(InputError, match="has a mask that is known for 11 slots, not for 30"):
        packed(model, shard_of((30,)))


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
    rows = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    tables.note(7, rows, (2, 4, 9, 8))
    rows[1, 0, 8, 0] = False
    with pytest.raises(InputError, match="with other values in every row"):
        tables.note(8, rows, (2, 4, 9, 8))
    monkeypatch.setattr("lengthwise.runtime.wrap.custom_masks.MOST_NUMBERS", 4 * 8 * 8)
    tables.note(0, MASKS["slopes"](8, torch.zeros(1)), (1, 4, 8, 8))
    with pytest.raises(InputError, match="set max_length=8"):
        tables.note(0, MASKS["slopes"](9, torch.zeros(1)), (1, 4, 9, 8))
    tables.note(1, MASKS["both ways"](90, None), (1, 4, 90, 8))  # a window needs no table


def test_a_bias_counts_up_to_what_is_the_same_for_all_that_a_slot_sees():
    """Some biases count from the end of the sequence, so that all of a row follow its length."""
    tables = MaskTables("Anchored")
    for length in (7, 11, 9):
        tables.note(0, (torch.arange(length) - float(length)).expand(length, length), (1, 4, length, 8))
    assert tables.is_known(11)
    hidden = torch.arange(25.0).view(1, 5, 5).masked_fill(torch.eye(5, dtype=torch.bool), -math.inf)
    tables.note(1, hidden, (1, 4, 5, 8))
    mask = tables.kind(1, hidden, shard_of((5,)))["mask"]
    assert torch.equal(mask(0, range(1), range(5), range(5)), hidden[0]), "a slot that does not see itself"


def test_each_call_and_each_dtype_has_a_table_of_its_own():
    tables, shard = MaskTables("Model"), shard_of((9,))
    given = [MASKS[name](9, torch.zeros(1)) for name in ("strides", "sinks", "sinks")]
    for number, mask in enumerate(given):
        tables.note(number, mask, (1, 4, 9, 8))
    for number, mask in enumerate(given):
        made = tables.kind(number, mask, shard)["mask"]
        assert torch.equal(made(0, range(1), range(9), range(9)), mask)
    with pytest.raises(InputError, match="attention call 0 of Model was given another mask"):
        tables.kind(0, given[1], shard)
    tables.use(torch.float32)
    assert not tables.is_known(9), "biases of another dtype are rounded otherwise"


def test_by_hand_what_is_trained_or_unknown_between_the_products_is_refused():
    q = torch.zeros(1, 4, 9, 8)
    scores = begin_scores(q, q.transpose(2, 3))
    with pytest.raises(InputError, match="of what is trained, such as a bias by position"):
        record_operation(torch.add, (scores, torch.zeros(9, 9, requires_grad=True)), {})
    with pytest.raises(InputError, match="calls topk between its products"):
        record_operation(torch.topk, (scores, 3), {})
    weights = record_operation(torch.softmax, (scores, -1), {})
    with pytest.raises(InputError, match="calls mul between its products"):
        record_operation(torch.mul, (weights, 2.0), {})
    for again in ((scores, 2), (weights, -1)):
        with pytest.raises(InputError, match="calls softmax between its products"):
            record_operation(torch.softmax, again, {})


@pytest.mark.parametrize("drop", [F.dropout, torch.dropout])
def test_weights_by_hand_are_dropped_only_where_the_model_says_that_it_trains(drop):
    q = torch.zeros(1, 4, 9, 8)
    weights = record_operation(torch.softmax, (begin_scores(q, q.transpose(2, 3)), -1), {})
    assert record_operation(drop, (weights, 0.3, True), {}).attended.dropout == 0.3
    assert record_operation(drop, (weights, 0.3, False), {}).attended.dropout == 0.0


def test_a_product_added_to_a_bias_is_that_of_torch():
    bias, q, k = torch.randn(4, 9, 9), torch.randn(4, 9, 8), torch.randn(4, 8, 9)
    for factors in ({"beta": 0.5, "alpha": 0.25}, {"alpha": 2.0}, {"beta": 0.0}, {}):
        attended = begin_scores_with_bias(bias, q, k, **factors).attended
        torch.testing.assert_close(attended.logits(q @ k), torch.baddbmm(bias, q, k, **factors))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_by_hand_has_the_scale_and_the_dropout_that_the_model_gives_it(monkeypatch, dropout):
    monkeypatch.setitem(MASKED_BY_HAND, "filled", lambda logits, tril: filled(logits * 0.7, tril))
    model = built(GPT, num_layers=1, mask="filled", dropout=dropout)
    model.transformer.drop = model.transformer.h[0].drop = nn.Identity()  # weights of attention alone are dropped
    wrapped_model = learned(model)
    tokens = micro_batch_of((9,)).tokens[None]
    with wrapped_model.plain():
        expected = model.eval()(tokens)[0]
    model.train()
    off = float((packed(model, shard_of((9,)))[0] - expected).abs().max())
    assert off > 1e-3 if dropout else off < 1e-12


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda logits, tril: filled(logits * 0.5, tril), "attention call 0 scales its logits by .* where it was"),
        (lambda logits, tril: filled(logits, tril).index_fill(-1, torch.tensor(1), -1e9), "was given another mask"),
    ],
)
def test_attention_by_hand_that_changes_after_it_was_learned_is_refused(monkeypatch, change, reason):
    model = built(GPT, num_layers=1, mask="filled")
    learned(model)
    packed(model, shard_of((9, 4)))
    monkeypatch.setitem(MASKED_BY_HAND, "filled", change)
    with pytest.raises(InputError, match=reason):
        packed(model, shard_of((9, 4)))


def flagged_key(logits, tril):
    """A key that tokens flag, the fourth from the end, is hidden, as by a mask that follows from data."""
    logits = filled(logits, tril)
    return logits.index_fill(-1, torch.tensor(logits.shape[-1] - 4), -1e9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda logits, tril: filled(logits * 0.5, tril), "attention call 0 scales its logits by .*, where it was"),
        (
            lambda logits, tril: filled(logits, tril.triu(-2)),
            "another mask .* -inf where it was 0, for a query at posi",
        ),
        (lambda logits, tril: filled(logits + slopes(len(tril), logits), tril), "another mask for a pack than follows"),
        (flagged_key, "another mask for a pack than follows from the positions"),
        (lambda logits, tril: filled(logits.clamp(-1.0), tril), "is another than when it was prepared, it does clamp"),
    ],
    ids=["scale", "window", "bias", "flagged key", "clamp"],
)
def test_every_call_by_hand_is_compared_in_every_layer_and_in_packs_longer_than_any_table(monkeypatch, change, reason):
    """The tenth micro-batch is compared as the first is, and its second layer as the first one."""
    model = built(GPT, num_layers=2, mask="filled")
    learned(model)
    for lengths in [(9, 4), (8,), (9, 10, 11, 7)] * 3:
        packed(model, shard_of(lengths))
    calls = iter(())
    monkeypatch.setitem(MASKED_BY_HAND, "filled", lambda *args: (change if next(calls) else filled)(*args))
    for lengths in ((9, 4), (9, 10, 11, 7)):
        calls = iter([False, True])
        with pytest.raises(InputError, match=reason.replace("call 0", "call 1")) as refused:
            packed(model, shard_of(lengths))
        assert "packing='never' of prepare" in str(refused.value)


@pytest.mark.parametrize("mask", ["filled", "filled in place", "biased"])
def test_operations_by_hand_that_are_as_before_are_not_computed_again(monkeypatch, mask):
    """So packs may have any number of slots; what is other there is refused without computing it."""
    model = built(GPT, num_layers=2, mask=mask)
    learned(model)
    packed(model, shard_of((11, 9)))
    monkeypatch.setattr("lengthwise.runtime.wrap.attention_calls.MOST_COMPUTED_SLOTS", 4)
    for lengths in ((11, 9), (5, 10, 8, 11)):
        packed(model, shard_of(lengths))
    other = MASKED_BY_HAND[mask]
    for change, reason in (
        (lambda logits, tril: other(logits * 1.5, tril), "with 1.5 to its logits, where it did"),
        (lambda logits, tril: other(logits, tril.triu(-3)), "to its logits with .* where it was .*, for a query"),
    ):
        monkeypatch.setitem(MASKED_BY_HAND, mask, change)
        with pytest.raises(
            InputError, match=f"attention call 0 is another than when it was prepared, it does .*{reason}"
        ):
            packed(model, shard_of((11, 9)))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("is_causal", "none", "attention call 0 has is_causal=False, where it was is_causal=True"),
        ("none", "is_causal", "attention call 0 has is_causal=True, where it was is_causal=False"),
        ("bool", "none", "was given no mask and is_causal=False, where it was given a mask"),
        ("bool", "is_causal", ""),
        ("is_causal", "bool", ""),
        ("is_causal", "narrow window", "was given another mask .* -inf where it was 0|False where it was True"),
        ("narrow window", "window", "was given another mask .* True where it was False"),
        ("bool", "float", "attention call 0 scales its logits by 0.3, where it was None"),
    ],
)
def test_what_a_loop_changes_of_an_attention_after_it_was_prepared_is_refused(before, after, reason):
    model = built(GPT, num_layers=1, mask=before)
    learned(model)
    packed(model, shard_of((9, 8)))
    model.transformer.h[0].attn.mask = after
    if not reason:
        packed(model, shard_of((9, 8)))
        return
    with pytest.raises(InputError, match=reason) as refused:
        packed(model, shard_of((9, 8)))
    assert "packing='never' of prepare" in str(refused.value)


@pytest.mark.parametrize("mask", ["sinks", "slopes", "strides"])
def test_a_mask_by_index_is_compared_beyond_the_slots_of_its_table(monkeypatch, mask):
    model = built(GPT, num_layers=1, mask=mask)
    learned(model)
    packed(model, shard_of((11, 9, 10, 8)))

    def flagged(t, x):
        values = as_it_was(t, x).clone()
        values[..., 24] = False if values.dtype == torch.bool else -1e30
        return values

    packed(model, shard_of((10, 9, 9)))
    as_it_was = MASKS[mask]
    monkeypatch.setitem(MASKS, mask, flagged)
    with pytest.raises(InputError, match="attention call 0 of GPT was given another mask for a pack"):
        packed(model, shard_of((11, 9, 10, 8)))


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


@pytest.mark.parametrize("made", ["bool", "added"])
def test_a_mask_in_a_ring_may_end_sequences_where_positions_jump_and_hides_nothing_else(made):
    shard = shard_of((5, 16), rank=0, degree=2, methods=(Method.RING,), is_causal=True)
    positions, sequences = shard.positions, shard.sequences
    runs = (torch.diff(positions, prepend=positions[:1] - 1) != 1).cumsum(0)
    assert runs.max() > sequences.max(), "the second sequence is in two parts on this rank"
    seen = positions[:, None] >= positions
    of_sequences, of_runs = (seen & (numbers[:, None] == numbers) for numbers in (sequences, runs))
    too_few, too_many = of_runs.clone(), of_runs.clone()
    too_few[-1, -2], too_many[-1, (sequences == 1).nonzero()[0]] = False, True

    def given(mask):
        return mask if made == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)

    def tables():
        learned = MaskTables("Model")
        learned.note(0, given(torch.ones(16, 16, dtype=torch.bool).tril()), (1, 4, 16, 8))
        return learned

    for mask in (of_sequences, of_runs):
        assert tables().kind(0, given(mask), shard)["causal"]
    for mask in (too_few, too_many):
        with pytest.raises(InputError, match="given another mask for a pack"):
            tables().kind(0, given(mask), shard)


def test_a_mask_that_is_open_on_one_side_is_a_window():
    seen = torch.ones(9, 9, dtype=torch.bool)
    for given, window in ((seen.tril(2), (1 << 62, 2)), (seen.triu(-2), (2, 1 << 62))):
        tables = MaskTables("Model")
        tables.note(0, given, (1, 4, 9, 8))
        assert tables.kind(0, given, shard_of((9,))) == {"causal": False, "window": window}


@pytest.mark.parametrize("mask", ["sinks", "filled"])
def test_dropout_of_masked_attention_is_the_same_for_a_sequence_in_every_pack(mask):
    model = prepared(built(GPT, mask=mask, dropout=0.3))
    together = computed(model, (9, 14))[0][0]
    assert torch.allclose(together[9:], computed(model, (14,), ids=(1,))[0][0], atol=1e-12)
