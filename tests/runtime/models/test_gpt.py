"""GPT beside transformers' GPT-2 (its equality is in test_hf) and beside itself."""

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.registry import build_model
from tests.runtime.models.cases import (
    assert_same,
    loss_and_gradients,
    model_of,
    pack_of,
    rows_that_matter,
    sequences,
    tiny_gpt,
    tokens_of,
)

SPECS = {
    "tied": tiny_gpt(),
    "untied": tiny_gpt(tied_embeddings=False),
    "heads of another size, shared": tiny_gpt(num_heads=6, num_kv_heads=2, head_size=5),
}


def test_weights_are_stored_with_the_sharded_dimension_first():
    model = build_model(tiny_gpt(tied_embeddings=False, max_positions=9), device="meta")
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters() if not name.startswith("layers.1")}
    assert shapes == {
        "embedding": [61, 24], "position": [9, 24], "final_norm": [24], "final_norm_bias": [24], "head": [61, 24],
        "layers.0.attention_norm": [24], "layers.0.attention_norm_bias": [24],
        "layers.0.qkv": [72, 24], "layers.0.qkv_bias": [72], "layers.0.proj": [24, 24], "layers.0.proj_bias": [24],
        "layers.0.ffn_norm": [24], "layers.0.ffn_norm_bias": [24],
        "layers.0.up": [40, 24], "layers.0.up_bias": [40], "layers.0.down": [40, 24], "layers.0.down_bias": [24],
    }  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pack_is_its_sequences_one_by_one_and_padding_changes_nothing(spec):
    model, padded = model_of(spec), pack_of(7, 1, 5, 5, 12, padded_to=14)
    padded_T = tokens_of(padded, spec.vocab_size)
    pack, tokens_T = pack_of(*padded.lengths), torch.cat(sequences(padded_T, padded))
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    parts = [loss_and_gradients(model, part, pack_of(len(part))) for part in sequences(tokens_T, pack)]
    assert_same(loss, sum(part[0] for part in parts))
    assert_same(grads, {name: sum(part[1][name] for part in parts) for name in grads})
    padded_loss, padded_grads = loss_and_gradients(model, padded_T, padded)
    assert_same(padded_loss, loss)
    assert_same(padded_grads, grads)


@pytest.mark.parametrize("flags", [(True, True), (False, True), (True, False)])
def test_recompute_changes_no_bit(flags):
    model, pack = model_of(SPECS["tied"]), pack_of(7, 3)
    tokens_T = tokens_of(pack, 61)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    again_loss, again_grads = loss_and_gradients(model, tokens_T, pack, recompute=flags)
    assert_same(again_loss, loss, tolerance=0)
    assert_same(again_grads, grads, tolerance=0)


def test_every_weight_matters():
    _, grads = loss_and_gradients(model_of(SPECS["untied"]), torch.arange(128) % 61, pack_of(128))
    assert rows_that_matter(grads) == {
        **{name: len(grad) for name, grad in grads.items()},
        "position": 127,  # the last token predicts nothing
        **{f"layers.{layer}.qkv_bias": 48 for layer in (0, 1)},  # a softmax does not notice a bias on keys
    }


def test_no_token_sees_a_later_one():
    model, tokens_T = model_of(SPECS["tied"]), tokens_of(pack_of(9), 61)
    other_T = tokens_T.clone()
    other_T[-1] = (other_T[-1] + 1) % 61
    first, second = (model.logits(tokens, (0, 9)) for tokens in (tokens_T, other_T))
    assert torch.equal(first[:-1], second[:-1]) and not torch.equal(first[-1], second[-1])


def test_initial_norms_are_one_and_biases_zero():
    for name, weight in build_model(SPECS["tied"]).named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.full_like(weight, 0.0 if name.endswith("bias") else 1.0)), name


def test_a_sequence_longer_than_the_positions_is_refused():
    model = build_model(tiny_gpt(max_positions=6))
    model.logits(tokens_of(pack_of(6, 6), 61), (0, 6, 12))
    with pytest.raises(InputError, match=r"7 tokens, model tiny has learned positions for 6; set data.max_length=6"):
        model.logits(tokens_of(pack_of(5, 7), 61), (0, 5, 12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "a gpt is causal"),
        ({"gated_ffn": True}, "has no gate"),
        ({"qkv_bias": False}, "biases everywhere; set qkv_bias"),
        ({"max_positions": 0}, "set max_positions"),
        ({"family": "transformer-1d"}, "a transformer-1d has rotary positions; max_positions must be 0"),
    ],
)
def test_what_a_gpt_cannot_be_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        build_model(tiny_gpt(**change))
