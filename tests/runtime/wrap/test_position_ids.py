"""Positions, and what is made of them, are those that the stock model derives for each sequence alone."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.batch import MASKED
from lengthwise.core.errors import InputError
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.verify.float64_mode import NoiseFreeMode
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.rotary_factors import LengthwiseRotary
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.runs import (
    VOCAB,
    Case,
    Packs,
    assert_exact,
    cross_entropy,
    in_double,
    learned,
    micro_batch_of,
    packed,
    randomised,
    shard_of,
    step_on_ranks,
)
from tests.runtime.loop.test_families import HEADS, SIZES, masked_losses, next_token_losses

DEGREES = (
    Packs(ranks=(0, 1, 2), packs=((2, 3), (6, 1), (0, 8)), recompute=(True, False)),
    Packs(ranks=(0, 1), packs=((4, 7),), phase=1),
    Packs(ranks=(2,), packs=((9, 5),), phase=1),
)
"""Degrees 3, 2 and 1; the sequence of one token shares a pack."""
SMALL = {**SIZES, "num_hidden_layers": 2}
PAD = 3
"""An ordinary token of the corpus: it is inside of its sequences."""
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.3, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0], "original_max_position_embeddings": 10, "factor": 4.0,
}  # fmt: skip
"""Sequences of more than 10 tokens have other factors than shorter ones."""
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def built(name, **options):
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    return randomised(model_class(model_class.config_class(**{**SMALL, **options})))


ROBERTA = {
    "num_attention_heads": 4, "intermediate_size": 24, "pad_token_id": PAD, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
NEXT = {"sum_of_losses": next_token_losses, "loss": cross_entropy}
HIDDEN = {
    "sum_of_losses": masked_losses, "loss": cross_entropy, "objective": MASKED,
    "masking": TokenMasking(seed=3, vocab_size=VOCAB, mask_token_id=1),
}  # fmt: skip
CASES = {
    "RoBERTa": Case(build=partial(built, "RobertaForMaskedLM", **ROBERTA), **HIDDEN),
    "data2vec": Case(build=partial(built, "Data2VecTextForCausalLM", is_decoder=True, **ROBERTA), **NEXT),
    "ESM with learned positions": Case(
        build=partial(
            built, "EsmForMaskedLM", position_embedding_type="absolute", token_dropout=False, mask_token_id=1, **ROBERTA
        ),
        **HIDDEN,
    ),
    "OPT": Case(
        build=partial(built, "OPTForCausalLM", num_attention_heads=4, ffn_dim=24, word_embed_proj_dim=32, dropout=0.0),
        **NEXT,
    ),
    "Phi-3 with longrope": Case(
        build=partial(built, "Phi3ForCausalLM", rope_parameters=LONGROPE, pad_token_id=0, **HEADS), **NEXT
    ),
    "Llama with dynamic NTK": Case(
        build=partial(built, "LlamaForCausalLM", rope_parameters=DYNAMIC, **{**HEADS, "max_position_embeddings": 8}),
        **NEXT,
    ),
}


BY_LENGTH = ("Phi-3 with longrope", "Llama with dynamic NTK")
"""Their rotary factors depend on the length."""


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.deep] * (n not in ("RoBERTa", "Phi-3 with longrope"))) for n in CASES]
)
def test_a_model_has_the_positions_of_its_stock_forward_at_degrees_1_to_3(ranks, name):
    for result in ranks(3).run(step_on_ranks, CASES[name], DEGREES):
        assert_exact(CASES[name], result, name)


def _logits_alone(model, sequence, length):
    tokens = np.random.default_rng(sequence).integers(0, VOCAB, length)
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_long_sequence_leaves_no_rotary_factors_to_a_later_one_or_to_the_released_model(name):
    with in_double():
        model = CASES[name].build()
        expected = torch.cat([_logits_alone(CASES[name].build(), i, length) for i, length in enumerate((21, 5, 12))])
        model(torch.zeros(1, 30, dtype=torch.long), use_cache=False)  # the user's own, before
        wrapped_model = learned(model)
        for _ in range(2):
            assert torch.allclose(packed(model, shard_of((21, 5, 12))).logits[0], expected, atol=1e-10)
        wrapped_model.release()
        assert torch.allclose(_logits_alone(model, 1, 5), expected[21:26], atol=1e-10)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_rotary_factors_are_those_of_each_sequence_in_any_order_also_of_plain_calls_and_of_copies(name):
    lengths = (21, 12, 5, 15)
    with in_double():
        expected = [_logits_alone(CASES[name].build(), i, length) for i, length in enumerate(lengths)]
        model = CASES[name].build()
        wrapped_model = learned(model)
        logits = packed(model, shard_of(lengths)).logits[0]
        assert torch.allclose(logits, torch.cat(expected), atol=1e-10)
        twin = copy.deepcopy(model)
        with wrapped_model.plain():
            for i, length in enumerate(lengths):
                assert torch.allclose(_logits_alone(model, i, length), expected[i], atol=1e-10)
        assert torch.allclose(_logits_alone(twin, 1, 12), expected[1], atol=1e-10)
        with wrapped_model.plain():
            _logits_alone(model, 0, 21)
        wrapped_model.release()
        assert set(vars(model.model.rotary_emb)) == set(vars(CASES[name].build().model.rotary_emb))
        assert torch.allclose(_logits_alone(model, 1, 12), expected[1], atol=1e-10)


AT_LIMIT = (9, 8, 21, 8, 10)
"""With 8 slots or 10, the stock module would keep the factors of the longer sequence before."""


@pytest.mark.parametrize("name", BY_LENGTH)
def test_rotary_factors_are_those_of_each_sequence_also_sequence_by_sequence(name):
    expected = [_logits_alone(CASES[name].build(), i, length) for i, length in enumerate(AT_LIMIT)]
    model = CASES[name].build()

    def in_turn(*lengths):
        micro_batch = micro_batch_of(lengths)
        with active(micro_batch.shard):
            return model(micro_batch.tokens[None], use_cache=False).logits[0]

    WrappedModel(model, by_sequence=True).learn([lambda: in_turn(11), lambda: in_turn(7)], (11, 7))
    assert torch.allclose(in_turn(*AT_LIMIT), torch.cat(expected), atol=1e-10)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_rotary_factors_are_computed_in_float64_where_packs_are_compared(name):
    """As those of the stock model are, whose calls leave nothing behind either."""
    model = CASES[name].build()
    wrapped_model = learned(model)
    with NoiseFreeMode(double=True):
        logits, before = packed(model, shard_of(AT_LIMIT)).logits[0], StateBetweenCalls(model)
        with wrapped_model.plain():
            expected = [_logits_alone(model, i, length) for i, length in enumerate(AT_LIMIT)]
    assert torch.allclose(logits, torch.cat(expected), atol=1e-12)
    assert not before.changes()


class OddRotary(nn.Module):
    """Factors that grow with the length, their slots in the first axis if they are flipped."""

    rope_type = "dynamic"

    def forward(self, x, position_ids, flipped=False, square=False):
        factors = position_ids[..., None].double() * (position_ids.max() + 1)
        if square:
            return factors * factors.mT
        return factors.movedim(0, 1) if flipped else factors


def test_the_slots_of_rotary_factors_are_where_the_arguments_of_the_call_say():
    model = nn.ModuleDict({"rotary": OddRotary()})
    rotary = LengthwiseRotary(model, is_plain=lambda: False)
    with active(shard_of((3, 2))) as shard:
        given = torch.zeros(1, 5, 4), shard.positions[None]
        expected = torch.tensor([0.0, 3, 6, 0, 2], dtype=torch.float64)
        assert torch.equal(model["rotary"](*given), expected[None, :, None])
        assert torch.equal(model["rotary"](*given, flipped=True), expected[:, None, None])
        with pytest.raises(InputError, match="so where its slots lie is not known"):
            model["rotary"](*given, square=True)
    rotary.release()
    assert "forward" not in vars(model["rotary"])


def test_rotary_factors_by_length_refuse_positions_that_do_not_tell_the_length():
    model = CASES["Phi-3 with longrope"].build()
    learned(model)
    shard = shard_of((8,))
    with pytest.raises(InputError, match=r"give micro_batch\.positions"):
        packed(model, shard, position_ids=shard.positions[None] + 4)


def doubled(embeddings, position_ids):
    return None if position_ids is None else position_ids * 2 % 40


def limited(embeddings, position_ids):
    return None if position_ids is None else position_ids.clamp(max=position_ids.numel() - 1)


def after_other_lookups(embeddings, position_ids):
    embeddings.word_embeddings(torch.tensor([1] if position_ids is None else [1, 2]))
    return position_ids


def two_lookups_more(embeddings, position_ids):
    embeddings.word_embeddings(torch.tensor([1, 2 + (position_ids is None)]))
    return position_ids


def with_embeddings(change):
    """A RoBERTa whose embeddings are given other positions."""
    model = CASES["RoBERTa"].build()
    embeddings = model.roberta.embeddings
    forward = embeddings.forward

    def changed(position_ids=None, **options):
        return forward(position_ids=change(embeddings, position_ids), **options)

    embeddings.forward = changed
    return model


@pytest.mark.parametrize("change", [doubled, limited, after_other_lookups, two_lookups_more])
def test_positions_that_no_position_ids_can_repeat_are_refused(change):
    with pytest.raises(InputError, match="cannot repeat"):
        WrappedModel(with_embeddings(change), objective=MASKED).inputs_of(micro_batch_of((9,)))


class Later(nn.Embedding):
    """Its rows begin at the third."""

    def forward(self, ids):
        return F.embedding(ids + 2, self.weight)


def starting_later():
    model = CASES["RoBERTa"].build()
    rows = model.roberta.embeddings.position_embeddings.weight
    model.roberta.embeddings.position_embeddings = Later(len(rows) + 2, rows.shape[1]).double()
    return model


def leaving_padding_out(embeddings, position_ids):
    """From 0 where nothing is padding."""
    kept = embeddings.seen_ids != PAD
    return kept.cumsum(1).sub(1).clamp(min=0) if position_ids is None else position_ids


def counting_from_zero():
    model = with_embeddings(leaving_padding_out)
    embeddings = model.roberta.embeddings
    embeddings.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(module, "seen_ids", kwargs["input_ids"]), with_kwargs=True
    )
    return model


@pytest.mark.parametrize("build", [CASES["RoBERTa"].build, starting_later])
def test_positions_that_follow_from_padding_tokens_are_those_of_each_sequence(build):
    given = WrappedModel(build(), objective=MASKED).inputs_of(micro_batch_of((21, 30), ids=(2, 5)))
    tokens = given["input_ids"][0]
    assert int((tokens == PAD).sum()), "one is inside"
    kept = torch.cat([(part != PAD).cumsum(0) * (part != PAD) for part in tokens.split((21, 30))])
    assert torch.equal(given["position_ids"][0], kept + PAD)


def test_tokens_with_a_meaning_that_the_first_micro_batch_lacks_are_tried():
    wrapped_model, first = WrappedModel(counting_from_zero(), objective=MASKED), micro_batch_of((5,), ids=(0,))
    assert not int((first.tokens == PAD).sum())
    assert wrapped_model.inputs_of(first)["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    given = wrapped_model.inputs_of(micro_batch_of((21, 30), ids=(2, 5)))
    expected = [(part != PAD).cumsum(0).sub(1).clamp(min=0) for part in given["input_ids"][0].split((21, 30))]
    assert torch.equal(given["position_ids"][0], torch.cat(expected))
