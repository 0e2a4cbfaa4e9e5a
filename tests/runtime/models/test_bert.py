"""BERT beside transformers' (logits and gradients are in test_hf too) and beside itself."""

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.hf_folder import to_hf
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.models.targets import IGNORE, TokenMasking, masked_targets
from tests.runtime.models.cases import (
    assert_same,
    loss_and_gradients,
    model_of,
    pack_of,
    rows_that_matter,
    sequences,
    tiny_bert,
    tokens_of,
)
from tests.runtime.models.test_hf_folder import theirs_of

SPECS = {
    "tied": tiny_bert(),
    "untied": tiny_bert(tied_embeddings=False),
    "heads of another size, shared": tiny_bert(num_heads=6, num_kv_heads=2, head_size=5),
}
MASKING = TokenMasking(seed=3, vocab_size=61, mask_token_id=60)


def test_weights_are_stored_with_the_sharded_dimension_first():
    model = build_model(tiny_bert(tied_embeddings=False, max_positions=9), device="meta")
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters() if not name.startswith("layers.1")}
    assert shapes == {
        "embedding": [61, 24], "position": [9, 24], "token_type": [2, 24],
        "embedding_norm": [24], "embedding_norm_bias": [24],
        "layers.0.attention_norm": [24], "layers.0.attention_norm_bias": [24],
        "layers.0.qkv": [72, 24], "layers.0.qkv_bias": [72], "layers.0.proj": [24, 24], "layers.0.proj_bias": [24],
        "layers.0.ffn_norm": [24], "layers.0.ffn_norm_bias": [24],
        "layers.0.up": [40, 24], "layers.0.up_bias": [40], "layers.0.down": [40, 24], "layers.0.down_bias": [24],
        "transform": [24, 24], "transform_bias": [24], "transform_norm": [24], "transform_norm_bias": [24],
        "head": [61, 24], "output_bias": [61],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_masked_loss_and_its_gradients_are_those_of_transformers(transformers, name):
    model, pack = model_of(SPECS[name]), pack_of(30, 1, 44)
    inputs_T, targets_T = masked_targets(tokens_of(pack, 61), pack, MASKING)
    theirs = theirs_of(transformers, model)
    loss = 0.0
    for tokens, labels in zip(sequences(inputs_T, pack), sequences(targets_T, pack)):
        mean = theirs(input_ids=tokens[None], labels=labels[None]).loss
        loss = loss + mean * (labels != IGNORE).sum()
    loss.backward()
    our_loss, our_grads = loss_and_gradients(model, inputs_T, pack, targets_T=targets_T)
    assert_same(our_loss, loss.detach())
    their_grads = {name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None}
    assert_same(to_hf(model.spec, our_grads), their_grads)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pack_is_its_sequences_one_by_one(spec):
    model, pack = model_of(spec), pack_of(7, 1, 5, 5, 12)
    tokens_T = tokens_of(pack, spec.vocab_size)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    parts = [loss_and_gradients(model, part, pack_of(len(part))) for part in sequences(tokens_T, pack)]
    assert_same(loss, sum(part[0] for part in parts))
    assert_same(grads, {name: sum(part[1][name] for part in parts) for name in grads})


@pytest.mark.parametrize("flags", [(True, True), (False, True), (True, False)])
def test_recompute_changes_no_bit(flags):
    model, pack = model_of(SPECS["tied"]), pack_of(7, 3)
    tokens_T = tokens_of(pack, 61)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    again_loss, again_grads = loss_and_gradients(model, tokens_T, pack, recompute=flags)
    assert_same(again_loss, loss, tolerance=0)
    assert_same(again_grads, grads, tolerance=0)


def test_every_weight_but_the_second_token_type_matters():
    tokens_T = torch.arange(122) % 61
    targets_T = tokens_T.flip(0)
    _, grads = loss_and_gradients(model_of(SPECS["untied"]), tokens_T, pack_of(122), targets_T=targets_T)
    assert rows_that_matter(grads) == {
        **{name: len(grad) for name, grad in grads.items()},
        "token_type": 1,
        "position": 122,
        **{f"layers.{layer}.qkv_bias": 48 for layer in (0, 1)},  # a softmax does not notice a bias on keys
    }


def test_the_first_token_sees_the_last():
    model, tokens_T = model_of(SPECS["tied"]), tokens_of(pack_of(9), 61)
    other_T = tokens_T.clone()
    other_T[-1] = (other_T[-1] + 1) % 61
    first, second = (model.logits(tokens, (0, 9)) for tokens in (tokens_T, other_T))
    assert (first != second).any(dim=1).all()


def test_initial_norms_are_one_and_biases_zero():
    for name, weight in build_model(SPECS["tied"]).named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.full_like(weight, 0.0 if name.endswith("bias") else 1.0)), name


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(InputError, match="7 tokens, model tiny has learned positions for 6"):
        build_model(tiny_bert(max_positions=6)).logits(tokens_of(pack_of(7), 61), (0, 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "a gpt is causal and a bert is not"),
        ({"gated_ffn": True}, "has no gate"),
        ({"qkv_bias": False}, "biases everywhere; set qkv_bias"),
        ({"max_positions": 0}, "set max_positions"),
    ],
)
def test_what_a_bert_cannot_be_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        build_model(tiny_bert(**change))
