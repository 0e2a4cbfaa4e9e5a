import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.core.specs import model_preset
from lengthwise.models.hf_config import hf_config, read_spec
from lengthwise.models.hf_names import naming_of
from lengthwise.runtime.models.hf_folder import (
    HfWeights,
    check_tensors,
    fuse_weight,
    load_weights,
    save_pretrained,
    to_hf,
    weight_shapes,
)
from lengthwise.runtime.models.registry import build_model
from tests.runtime.models.cases import (
    assert_same,
    loss_and_gradients,
    model_of,
    pack_of,
    sequences,
    tiny,
    tiny_bert,
    tiny_gpt,
    tokens_of,
)
from tests.runtime.models.conftest import in_own_dtype
from tests.runtime.models.test_rope import SCALINGS

SPECS = {
    "llama": tiny(),
    "llama tied": tiny(tied_embeddings=True),
    "llama ungrouped": tiny(num_kv_heads=6),
    "llama linear": tiny(rope_scaling=SCALINGS["linear"]),
    "llama3": tiny(rope_scaling=SCALINGS["llama3"], rope_theta=5e5),
    "qwen2": tiny(qkv_bias=True, norm_eps=1e-6),
    "qwen2 tied": tiny(qkv_bias=True, tied_embeddings=True),
    "gpt2": tiny_gpt(),
    "gpt2 untied": tiny_gpt(tied_embeddings=False, norm_eps=1e-3),
    "bert": tiny_bert(mask_token_id=7),
    "bert untied": tiny_bert(tied_embeddings=False, norm_eps=1e-3),
}
# transformers' second names of tied weights; and in an untied BERT a bias that it does not use.
NOT_OURS = {
    "llama": {"lm_head.weight"},
    "gpt": {"lm_head.weight"},
    "bert": {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
}
UNUSED_BIAS = "cls.predictions.bias"
# transformers rounds rotary angles and norms to float32, we only the latter; logits here are of order one.
FLOAT32_TOLERANCE = 1e-5


def from_hf(spec, tensors):
    """Convert Hugging Face's tensors to a state dict of this library's model."""
    tensors = {naming_of(spec).today(name): tensor for name, tensor in tensors.items()}
    check_tensors(spec, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "the tensors")
    return {name: fuse_weight(spec, name, tensors) for name in weight_shapes(spec)}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request):
    return request.param


def theirs_of(transformers, model):
    """The same model in transformers, in float64 throughout."""
    config = transformers.AutoConfig.for_model(**hf_config(model.spec, dtype="float64"))
    theirs = auto_class(transformers, model.spec).from_config(config, dtype=torch.float64).eval()
    missing = theirs.load_state_dict(to_hf(model.spec, dict(model.named_parameters())), strict=False)
    unused = {UNUSED_BIAS} if model.spec.family == "bert" else set()
    assert set(missing.missing_keys) == (NOT_OURS[model.spec.family] if model.spec.tied_embeddings else unused)
    assert not missing.unexpected_keys
    return in_own_dtype(theirs)


def auto_class(transformers, spec):
    return transformers.AutoModelForCausalLM if spec.causal else transformers.AutoModelForMaskedLM


def their_logits(theirs, tokens):
    options = {"use_cache": False} if theirs.config.model_type != "bert" else {}
    return theirs(input_ids=tokens[None], **options).logits[0]


def test_logits_loss_and_every_gradient_are_those_of_transformers(transformers, spec):
    model, pack = model_of(spec), pack_of(11, 1, 6, 6)
    tokens_T = tokens_of(pack, spec.vocab_size)
    theirs = theirs_of(transformers, model)
    logits = [their_logits(theirs, tokens) for tokens in sequences(tokens_T, pack)]
    loss = sum(F.cross_entropy(x[:-1], y[1:], reduction="sum") for x, y in zip(logits, sequences(tokens_T, pack)))
    loss.backward()
    their_grads = {name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None}

    our_loss, our_grads = loss_and_gradients(model, tokens_T, pack)
    assert_same(model.logits(tokens_T, pack.cu_seqlens).detach(), torch.cat(logits).detach())
    assert_same(our_loss, loss.detach())
    assert_same(to_hf(spec, our_grads), their_grads)


def test_a_saved_model_loads_in_transformers_with_identical_logits(transformers, spec, tmp_path):
    model = model_of(spec)
    save_pretrained(model, tmp_path / "saved", config={"max_position_embeddings": 640, "eos_token_id": 5})
    theirs, loading = auto_class(transformers, spec).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not loading["unexpected_keys"] and set(loading["missing_keys"]) <= {UNUSED_BIAS}
    assert theirs.config.max_position_embeddings == (spec.max_positions or 640)
    assert theirs.config.eos_token_id == 5
    assert theirs.dtype is torch.float64
    tokens = tokens_of(pack_of(17), spec.vocab_size)
    assert_same(their_logits(in_own_dtype(theirs), tokens), model.logits(tokens, (0, 17)))


def test_transformers_unchanged_agrees_in_float32(transformers, spec, tmp_path):
    model = build_model(spec, seed=2)
    save_pretrained(model, tmp_path / "saved")
    theirs = auto_class(transformers, spec).from_pretrained(tmp_path / "saved")
    tokens = tokens_of(pack_of(100), spec.vocab_size)
    assert_same(their_logits(theirs, tokens), model.logits(tokens, (0, 100)), tolerance=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_model_saved_by_transformers_loads_here(transformers, spec, tmp_path, shard_size):
    theirs = theirs_of(transformers, model_of(spec, seed=7))
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    read = read_spec(tmp_path)
    assert read == replace(spec, name=read.name)
    model = build_model(read, dtype=torch.float64)
    load_weights(model, tmp_path)
    tokens = tokens_of(pack_of(17), spec.vocab_size)
    assert_same(model.logits(tokens, (0, 17)), their_logits(theirs, tokens))


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
def test_save_then_load_changes_no_bit(tmp_path, spec, max_shard_bytes):
    model = model_of(spec)
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    again = build_model(read_spec(tmp_path / "saved"), dtype=torch.float64, seed=9)
    load_weights(again, tmp_path / "saved")
    assert_same(again.state_dict(), model.state_dict(), tolerance=0)


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
def test_weights_of_a_folder_are_read_by_name_and_told_apart_by_every_byte(tmp_path, spec, max_shard_bytes):
    model = model_of(spec)
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    weights = HfWeights(spec, tmp_path / "saved")
    for name, weight in model.state_dict().items():
        assert_same(weights.value(name), weight, tolerance=0)
    name, changed = next((name, weight) for name, weight in model.named_parameters() if weight.ndim > 1)
    with torch.no_grad():
        changed[-1, -1] += 1
    save_pretrained(model, tmp_path / "other", max_shard_bytes=max_shard_bytes)
    one, other = weights.identity(), HfWeights(spec, tmp_path / "other").identity()
    assert [key for key in one if one[key] != other[key]] == [name]


def test_shards_of_ours_load_in_transformers(transformers, tmp_path):
    model = model_of(SPECS["qwen2 tied"])
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(theirs.get_input_embeddings().weight, model.embedding, tolerance=0)


def test_from_hf_undoes_to_hf(spec):
    weights = dict(model_of(spec).state_dict())
    assert_same(from_hf(spec, to_hf(spec, weights)), weights, tolerance=0)


def test_saving_in_another_dtype_rounds_the_weights(tmp_path):
    model = model_of(SPECS["llama"])
    save_pretrained(model, tmp_path / "saved", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], model.head.to(torch.bfloat16))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.runtime.models.hf_folder.write_config", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_pretrained(model_of(SPECS["llama"]), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_not_overwritten(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not an empty folder"):
        save_pretrained(model_of(SPECS["llama"]), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def edit_tensors(folder, edit):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \[3\].*needs \[24\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, edit, message):
    model = model_of(SPECS["llama"])
    save_pretrained(model, tmp_path / "saved")
    edit_tensors(tmp_path / "saved", edit)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_weights(model, tmp_path / "saved")
    assert_same(model.state_dict(), before, tolerance=0)


def test_derived_and_tied_tensors_of_old_checkpoints_are_passed_over(tmp_path):
    model = model_of(SPECS["llama tied"])
    save_pretrained(model, tmp_path / "saved")
    surplus = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(61, 24)}
    edit_tensors(tmp_path / "saved", lambda tensors: tensors.update(surplus))
    load_weights(model, tmp_path / "saved")


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(InputError, match="neither"):
        load_weights(model_of(SPECS["llama"]), tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_damaged_files_are_refused(tmp_path, file):
    (tmp_path / file).write_text("{}")
    with pytest.raises(InputError, match=file):
        load_weights(model_of(SPECS["llama"]), tmp_path)


def write_edited_config(folder, spec, **changes):
    config = {**hf_config(spec, dtype="float32"), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": "absent"}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"vocab_size": "absent"}, "vocab_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, change, field):
    with pytest.raises(InputError, match=field):
        read_spec(write_edited_config(tmp_path, tiny(), **change))


@pytest.mark.parametrize(
    ("spec", "change", "field"),
    [
        (SPECS["gpt2"], {"activation_function": "relu"}, "activation_function"),
        (SPECS["gpt2"], {"scale_attn_weights": False}, "scale_attn_weights"),
        (SPECS["gpt2"], {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (SPECS["gpt2"], {"add_cross_attention": True}, "add_cross_attention"),
        (SPECS["gpt2"], {"quantization_config": {"bits": 4}}, "quantization_config"),
        (SPECS["gpt2"], {"n_positions": "absent"}, "n_positions"),
        (SPECS["gpt2"], {"n_head": 5}, "5 heads cannot share a hidden size of 24"),
        (SPECS["bert"], {"architectures": ["BertForPreTraining"]}, "BertForPreTraining"),
        (SPECS["bert"], {"hidden_act": "gelu_new"}, "hidden_act"),
        (SPECS["bert"], {"type_vocab_size": 1}, "type_vocab_size"),
        (SPECS["bert"], {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (SPECS["bert"], {"is_decoder": True}, "is_decoder"),
        (SPECS["bert"], {"add_cross_attention": True}, "add_cross_attention"),
        (SPECS["bert"], {"mask_token_id": 61}, "mask_token_id = 61"),
        (SPECS["bert"], {"max_position_embeddings": "absent"}, "max_position_embeddings"),
    ],
)
def test_what_gpt2_and_bert_cannot_be_here_is_refused_by_name(tmp_path, spec, change, field):
    with pytest.raises(InputError, match=field):
        read_spec(write_edited_config(tmp_path, spec, **change))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tiny(family="transformer-1d", gated_ffn=False), "transformers has no transformer-1d"),
        (tiny_gpt(num_kv_heads=1), "no gpt of transformers"),
        (tiny_bert(head_size=4), "no bert of transformers"),
    ],
)
def test_what_transformers_does_not_have_is_not_written(tmp_path, spec, message):
    with pytest.raises(InputError, match=message):
        save_pretrained(build_model(spec), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


OLD_NAMES = {
    "gpt2": (lambda name: name.removeprefix("transformer."), ("h.0.attn.bias", "h.1.attn.masked_bias")),
    "bert": (
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        ("bert.pooler.dense.weight", "cls.seq_relationship.bias", "bert.embeddings.position_ids"),
    ),
}


@pytest.mark.parametrize("kind", OLD_NAMES)
def test_weights_are_read_under_the_names_of_the_published_files(tmp_path, kind):
    model, (old, surplus) = model_of(SPECS[kind]), OLD_NAMES[kind]
    save_pretrained(model, tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    save_file({old(k): v for k, v in tensors.items()} | {name: torch.zeros(3) for name in surplus}, file)
    again = build_model(model.spec, dtype=torch.float64, seed=9)
    load_weights(again, tmp_path / "saved")
    assert_same(again.state_dict(), model.state_dict(), tolerance=0)
    assert_same(from_hf(model.spec, {old(k): v for k, v in tensors.items()}), dict(model.state_dict()), tolerance=0)


def test_a_bert_keeps_its_mask_token_in_its_folder(tmp_path):
    save_pretrained(model_of(SPECS["bert"]), tmp_path / "saved")
    assert read_spec(tmp_path / "saved").mask_token_id == 7
    save_pretrained(model_of(SPECS["bert untied"]), tmp_path / "other")
    assert read_spec(tmp_path / "other").mask_token_id is None


@pytest.mark.parametrize("name", ["bert-1024", "gpt-12288"])
def test_presets_have_the_sizes_of_transformers_own(transformers, name):
    spec = model_preset(name)
    config = transformers.AutoConfig.for_model(**hf_config(spec, dtype="float32"))
    with torch.device("meta"):
        theirs = auto_class(transformers, spec).from_config(config)
    assert sum(weight.numel() for weight in theirs.parameters()) == spec.num_params


def test_a_missing_or_damaged_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        read_spec(tmp_path)


def test_configurations_from_before_transformers_5_are_read(tmp_path, spec):
    scaling = {"type" if key == "rope_type" else key: value for key, value in spec.rope_scaling} or None
    folder = write_edited_config(tmp_path, spec, rope_parameters="absent", rope_scaling=scaling)
    assert read_spec(folder).digest == spec.digest


def test_a_sliding_window_that_no_layer_uses_is_no_obstacle(tmp_path):
    spec = SPECS["qwen2"]
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": spec.num_layers}
    assert read_spec(write_edited_config(tmp_path, spec, **changes)).digest == spec.digest
