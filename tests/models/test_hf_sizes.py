"""Sizes of models of any family from config.json, against what their makers publish."""

import json

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.memory_model import state_bytes
from lengthwise.models.hf_sizes import has_slices, read_priced_spec
from lengthwise.plan.space.search_space import SearchSpace

MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_experts_per_tok": 2, "num_local_experts": 8, "vocab_size": 32000, "tie_word_embeddings": False,
    "sliding_window": None,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None, "vocab_size": 151936,
}  # fmt: skip
GLM_45 = {
    "model_type": "glm4_moe", "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "vocab_size": 151552,
}  # fmt: skip
LLAMA4_SCOUT = {"text_config": {
    "model_type": "llama4_text", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
    "vocab_size": 202048, "tie_word_embeddings": False,
}}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
    "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "sliding_window": 128, "vocab_size": 201088, "tie_word_embeddings": False,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "multi_query": True, "num_attention_heads": 71,
    "num_hidden_layers": 32, "vocab_size": 65024, "activation": "gelu",
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
    "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
BLOOM_7B = {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "num_attention_heads": 32, "vocab_size": 250880}
XLNET_LARGE = {
    "model_type": "xlnet", "d_inner": 4096, "d_model": 1024, "ff_activation": "gelu", "n_head": 16, "n_layer": 24,
    "vocab_size": 32000, "tie_word_embeddings": True,
}  # fmt: skip
CTRL = {
    "model_type": "ctrl", "dff": 8192, "n_embd": 1280, "n_head": 16, "n_layer": 48, "vocab_size": 246534,
    "tie_word_embeddings": True,
}  # fmt: skip


VIT = {
    "architectures": ["ViTModel"], "model_type": "vit", "hidden_act": "gelu", "hidden_size": 768, "image_size": 224,
    "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(config):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return read_priced_spec(tmp_path)

    return read


def active_params(spec):
    """Parameters that a token uses; makers of some models leave out embedding and head, which is added below."""
    return spec.num_params - spec.num_layers * spec.idle_ffn_params


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (MIXTRAL, 46.7, 12.9), (QWEN3_30B, 30.5, 3.3), (GLM_45, 353, 32 + 1.55), (LLAMA4_SCOUT, 107.8, 17.2),
        (GPT_OSS_20B, 20.9, 3.6 + 0.58), (GEMMA2_9B, 9.24, 9.24), (FALCON_7B, 6.92, 6.92), (MISTRAL, 7.24, 7.24),
        (BLOOM_7B, 7.07, 7.07), (XLNET_LARGE, 0.335, 0.335), (CTRL, 1.64, 1.64),
    ],
    ids=["mixtral", "qwen3", "glm4.5", "llama4", "gpt-oss", "gemma2", "falcon", "mistral", "bloom", "xlnet", "ctrl"],
)  # fmt: skip
def test_parameters_are_those_that_are_published(read, config, billions, active):
    spec = read(config)
    assert spec.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_params(spec) / 1e9 == pytest.approx(active, rel=0.03)


def test_experts_cost_flops_of_those_used_and_bytes_of_all(read):
    spec = read(MIXTRAL)
    tokens = np.array([1.0])
    matmuls = active_params(spec) - 32_000 * 4096 - spec.num_layers * spec.layer_whole_params
    assert spec.train_flops(tokens)[0] == pytest.approx(6 * matmuls, rel=1e-3)
    assert state_bytes(spec, num_devices=8, dtype="bfloat16") > 46e9 * 6
    assert "routing between experts" in spec.unpriced


@pytest.mark.parametrize(("config", "layers"), [(GEMMA2_9B, 21), (GPT_OSS_20B, 12), (MISTRAL, 32)])
def test_a_window_limits_the_pairs_that_attention_costs(read, config, layers):
    spec, length = read(config), 10_000
    assert spec.num_window_layers == layers
    positions = np.arange(length)
    pairs = np.minimum(positions + 1, spec.window).sum() / (length**2 / 2)  # of a causal mask
    share = layers / spec.num_layers
    assert spec.reach(np.array([float(length)]))[0] / length == pytest.approx(1 - share + share * pairs, rel=1e-3)
    assert spec.reach(np.array([100.0]))[0] == 100


def test_every_family_is_priced_under_every_kind_of_scheme(read):
    cluster = cluster_preset("1x8xH200-141GB")
    for config in (MIXTRAL, GEMMA2_9B, FALCON_7B):
        spec = read(config)
        cost = AnalyticCost(model=spec, cluster=cluster)
        schemes = SearchSpace(max_degree=1, max_stages=8).schemes(spec.num_layers, cluster, recomputed=[0])
        assert all(cost.time_s([4096], scheme) > 0 for scheme in schemes)


def test_what_training_reads_is_read_with_its_details(read):
    config = {**MISTRAL, "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}
    del config["sliding_window"]
    spec = read(config)
    assert (spec.family, spec.rope_theta, spec.unpriced) == ("llama", 5e5, "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MIXTRAL, "hidden_size": None}, "lacks hidden_size or n_embd or n_embed or d_model"),
        ({**MIXTRAL, "num_hidden_layers": 0}, "num_hidden_layers or n_layer or n_layers or num_layers is 0"),
        (
            {**MIXTRAL, "intermediate_size": [1, 2]},
            r"intermediate_size = \[1, 2\]: layers or parts of sizes of their own",
        ),
        ({**MIXTRAL, "intermediate_size": 0.5}, "intermediate_size must be a whole number from 0"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "9 experts per token of 8"),
        ({**MIXTRAL, "num_key_value_heads": 5}, "32 heads cannot share 5"),
        ({**MIXTRAL, "kv_lora_rank": 512}, "kv_lora_rank = 512, multi-head latent attention, has no cost model"),
        ({**MIXTRAL, "is_encoder_decoder": True}, "an encoder with a decoder, has no cost model"),
        ({**MIXTRAL, "layer_types": ["mamba"]}, "layer_types has mamba; only full_attention"),
        ({**MIXTRAL, "layer_types": "full"}, "layer_types must be a list"),
        ({**MIXTRAL, "mamba_d_state": 16}, "such as state-space layers, have no cost model"),
        (VIT, r"config.json is that of no language model \(ViTModel\): it has image_size, and .*lengthwise.prepare"),
        (
            {"architectures": ["CLIPModel"], "text_config": MISTRAL, "vision_config": VIT},
            r"is that of no language model \(CLIPModel\): it has vision_config, ",
        ),
        ({"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}, "lacks intermediate_size or"),
        ("[]", r"holds \[\], not an object"),
        ("{", "is not a model's configuration"),
    ],
)
def test_what_has_no_cost_model_is_refused_by_file_and_field(read, config, message):
    with pytest.raises(InputError, match=message) as error:
        read(config)
    assert "\n" not in str(error.value)


def test_a_language_model_that_sees_pictures_too_is_priced(read):
    sees = {"architectures": ["LlavaForConditionalGeneration"], "text_config": MISTRAL, "vision_config": VIT}
    for config in (sees, {**sees, "architectures": []}):
        assert read(config).unpriced == "everything but the text model"


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no config\.json"):
        read_priced_spec(tmp_path)


@pytest.mark.parametrize(
    ("config", "has_biases"),
    [
        (MIXTRAL, False), (MISTRAL, False), (GEMMA2_9B, False), (FALCON_7B, False), (QWEN3_30B, False),
        ({**QWEN3_30B, "attention_bias": True}, True), (GPT_OSS_20B, True), ({**GPT_OSS_20B, "no_bias": True}, False),
        ({**FALCON_7B, "bias": True}, True),
    ],
)  # fmt: skip
def test_biases_are_said_to_lack_a_price_only_where_there_are_any(tmp_path, config, has_biases):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ("biases" in read_priced_spec(tmp_path).unpriced) == has_biases


def test_micro_batches_may_be_sliced_where_every_token_sees_all_before_it(read):
    words = ("expert", "moe", "sparse")
    qwen3 = {name: value for name, value in QWEN3_30B.items() if not any(word in name for word in words)}
    assert has_slices(read({**qwen3, "model_type": "qwen3", "intermediate_size": 6144}))
    assert has_slices(model_preset("llama-7b")) and not has_slices(model_preset("bert-1024"))
    assert not has_slices(read(MIXTRAL)), "its router balances experts over all tokens"
    assert not has_slices(read(GEMMA2_9B))
