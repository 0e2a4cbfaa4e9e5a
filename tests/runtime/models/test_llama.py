from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.specs import MODELS
from lengthwise.runtime.models.registry import build_model
from tests.runtime.models.cases import assert_same, loss_and_gradients, model_of, pack_of, sequences, tiny, tokens_of

SPECS = {
    "grouped": tiny(),
    "tied with bias": tiny(tied_embeddings=True, qkv_bias=True),
    "one group": tiny(num_kv_heads=1),
    "ungrouped": tiny(num_kv_heads=6),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_as_many_parameters_as_its_spec_says(name):
    model = build_model(MODELS[name], device="meta")
    assert sum(weight.numel() for weight in model.parameters()) == MODELS[name].num_params


def test_weights_are_stored_with_the_sharded_dimension_first():
    model = build_model(tiny(qkv_bias=True), device="meta")
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters() if not name.startswith("layers.1")}
    assert shapes == {
        "embedding": [61, 24], "final_norm": [24], "head": [61, 24],
        "layers.0.attention_norm": [24], "layers.0.qkv": [80, 24], "layers.0.qkv_bias": [80], "layers.0.proj": [48, 24],
        "layers.0.ffn_norm": [24], "layers.0.gate": [40, 24], "layers.0.up": [40, 24], "layers.0.down": [40, 24],
    }  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pack_is_its_sequences_one_by_one(spec):
    model, pack = model_of(spec), pack_of(7, 1, 5, 5, 12)
    tokens_T = tokens_of(pack, spec.vocab_size)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    parts = [loss_and_gradients(model, part, pack_of(len(part))) for part in sequences(tokens_T, pack)]
    assert_same(loss, sum(part[0] for part in parts))
    assert_same(grads, {name: sum(part[1][name] for part in parts) for name in grads})


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), extra=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_a_padded_pack_is_the_dense_one_whatever_the_padding_holds(lengths, extra):
    model, dense = model_of(SPECS["grouped"]), pack_of(*lengths)
    padded = pack_of(*lengths, padded_to=max(lengths) + extra)
    padded_T = tokens_of(padded, 61)
    dense_T = torch.cat(sequences(padded_T, padded))
    (dense_loss, dense_grads), (loss, grads) = (
        loss_and_gradients(model, tokens_T, pack) for tokens_T, pack in ((dense_T, dense), (padded_T, padded))
    )
    assert_same(loss, dense_loss)
    assert_same(grads, dense_grads)


@pytest.mark.parametrize("flags", [(True, True), (False, True), (True, False)])
def test_recompute_changes_no_bit(flags):
    model, pack = model_of(SPECS["tied with bias"]), pack_of(7, 3)
    tokens_T = tokens_of(pack, 61)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    again_loss, again_grads = loss_and_gradients(model, tokens_T, pack, recompute=flags)
    assert_same(again_loss, loss, tolerance=0)
    assert_same(again_grads, grads, tolerance=0)


def test_a_recomputed_layer_keeps_only_its_input():
    model, pack = model_of(tiny(num_layers=3)), pack_of(32)
    tokens_T = tokens_of(pack, 61)

    def kept_bytes(recompute):
        kept = {}
        weights = {weight.data_ptr() for weight in model.parameters()}

        def pack_hook(x):
            if x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
            hidden = model.hidden(tokens_T, pack.cu_seqlens, recompute=recompute)
        del hidden
        return sum(kept.values())

    layer_inputs = 3 * 32 * 24 * 8
    assert kept_bytes((True,) * 3) <= layer_inputs + tokens_T.nbytes
    assert kept_bytes((False,) * 3) > 5 * layer_inputs


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model, pack = model_of(SPECS["grouped"]), pack_of(6, 4)
    tokens_T = tokens_of(pack, 61)
    log_probs_TV = model.logits(tokens_T, pack.cu_seqlens).log_softmax(-1)
    expected = -sum(log_probs_TV[t, tokens_T[t + 1]] for t in (0, 1, 2, 3, 4, 6, 7, 8))
    assert_same(loss_and_gradients(model, tokens_T, pack)[0], expected.detach())


def test_training_after_evaluation_is_not_disturbed_by_it():
    model, pack = model_of(SPECS["grouped"]), pack_of(6, 4)
    tokens_T = tokens_of(pack, 61)
    before = loss_and_gradients(model, tokens_T, pack)
    with torch.inference_mode():
        model.logits(tokens_T, pack.cu_seqlens)
    assert_same(loss_and_gradients(model, tokens_T, pack)[1], before[1], tolerance=0)


def test_initial_weights_depend_on_the_seed_and_not_on_the_dtype():
    wide, narrow, other = (
        dict(build_model(tiny(), dtype=dtype, seed=seed).named_parameters())
        for dtype, seed in ((torch.float64, 3), (torch.bfloat16, 3), (torch.float64, 4))
    )
    for name, weight in wide.items():
        assert torch.equal(weight.to(torch.bfloat16), narrow[name])
        assert name.endswith("norm") or not torch.equal(weight, other[name])
    assert not torch.equal(wide["layers.0.gate"], wide["layers.1.gate"])


def test_initial_weights_have_the_spread_of_gpt2():
    model = build_model(replace(tiny(hidden_size=64, ffn_size=512), num_layers=8))
    assert model.layers[0].gate.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[0].down.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.final_norm, torch.ones(64))


def test_bfloat16_and_float32_models_train():
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(tiny(), dtype=dtype)
        loss, grads = loss_and_gradients(model, tokens_of(pack_of(9, 4), 61), pack_of(9, 4))
        assert loss.dtype is torch.float32
        assert all(grad.dtype is dtype and grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "rwkv"}, "no family 'rwkv'; known: "),
        ({"gated_ffn": False}, "not a causal Llama"),
        ({"causal": False}, "not a causal Llama"),
        ({"family": "transformer-2d", "causal": False}, "needs frame_size"),
    ],
)
def test_other_architectures_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        build_model(tiny(**change))
