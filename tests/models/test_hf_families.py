"""Sizes of families whose fields mean something of their own, against the classes of transformers 5.23.

The numbers are those of ``sum(p.numel() for p in model.parameters())`` for each class's default configuration.
"""

import json

import pytest

from lengthwise.core.errors import InputError
from lengthwise.models.hf_sizes import read_priced_spec


def config(family, sizes, **fields):
    """A configuration with layers, hidden size, heads, key/value heads, feed-forward and vocabulary in this order."""
    names = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )  # fmt: skip
    known = {name: size for name, size in zip(names, sizes, strict=True) if size}
    return {"model_type": family, "hidden_act": "silu", "tie_word_embeddings": False, **known, **fields}


def dense_then_sparse(num_dense, num_sparse):
    return ["dense"] * num_dense + ["sparse"] * num_sparse


FAMILIES = {
    "ernie4_5_moe": (21_825_437_888, config(
        "ernie4_5_moe", (28, 2560, 20, 4, 12288, 103424), moe_intermediate_size=1536, moe_k=6, moe_num_experts=64,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=27, moe_layer_interval=1,
        tie_word_embeddings=True,
    )),
    "aria_text": (18_517_069_824, config(
        "aria_text", (32, 4096, 32, 32, 4096, 32000), moe_num_experts=8, moe_topk=2, moe_num_shared_experts=2,
    )),
    "afmoe": (19_232_600_000, config(
        "afmoe", (32, 2048, 16, 16, 6144, 200192), head_dim=128, moe_intermediate_size=1408, num_experts=64,
        num_experts_per_tok=6, num_shared_experts=2, num_dense_layers=1,
    )),
    "laguna": (33_189_975_808, config(
        "laguna", (40, 2048, 48, 8, 8192, 100352), head_dim=128, moe_intermediate_size=512, num_experts=256,
        num_experts_per_tok=8, shared_expert_intermediate_size=512, mlp_layer_types=dense_then_sparse(1, 39),
    )),
    "hy_v3": (295_033_528_320, config(
        "hy_v3", (80, 4096, 64, 8, 13312, 120832), head_dim=128, moe_intermediate_size=1536, num_experts=192,
        num_experts_per_tok=8, num_shared_experts=1, mlp_layer_types=dense_then_sparse(1, 79),
    )),
    "beam": (501_267_599_808, config(
        "beam", (52, 5120, 48, 8, 20480, 151936), head_dim=128, moe_intermediate_size=2560, num_experts=256,
        num_experts_per_tok=8, mlp_layer_types=dense_then_sparse(3, 49),
    )),
    "minimax_m3_vl_text": (447_186_441_216, config(
        "minimax_m3_vl_text", (60, 6144, 64, 4, 3072, 200064), head_dim=128, dense_intermediate_size=12288,
        num_local_experts=128, num_experts_per_tok=4, shared_intermediate_size=3072,
        mlp_layer_types=dense_then_sparse(0, 60),
    )),
    "doge": (403_055_872, config(
        "doge", (32, 1024, 8, 8, 2048, 32768), num_experts=16384, num_experts_per_tok=64, is_moe=False,
    )),
    "granitemoe": (37_039_116_288, config(
        "granitemoe", (32, 4096, 32, 32, 11008, 32000), num_local_experts=8, num_experts_per_tok=2,
    )),
    "falcon": (6_921_720_704, config(
        "falcon", (32, 4544, 71, 0, 0, 65024), ffn_hidden_size=18176, num_kv_heads=71, multi_query=True,
        new_decoder_architecture=False, activation="gelu", hidden_act=None, tie_word_embeddings=True,
    )),
    "bitnet": (2_741_155_840, config("bitnet", (30, 2560, 20, 5, 6912, 128256), hidden_act="relu2")),
    "vaultgemma": (2_614_222_080, config(
        "vaultgemma", (26, 2304, 8, 4, 9216, 256000), head_dim=256, hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )),
    "apertus": (6_979_596_352, config("apertus", (32, 4096, 32, 32, 14336, 131072), hidden_act="xielu")),
    "moshi": (6_839_083_008, config("moshi", (32, 4096, 32, 32, 0, 32000), ffn_dim=22528, head_dim=128)),
    "modernbert": (149_655_232, config(
        "modernbert", (22, 768, 12, 0, 1152, 50368), hidden_act="gelu", tie_word_embeddings=True,
    )),
    "gte": (306_210_496, config("gte", (12, 768, 12, 0, 3072, 250048), hidden_act="gelu", tie_word_embeddings=True)),
    "nomic_bert": (137_354_304, {
        key: value
        for key, value in config("nomic_bert", (12, 768, 12, 0, 3072, 30528)).items()
        if key != "tie_word_embeddings"
    }),
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_priced_spec(tmp_path)

    return read


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_class_in_transformers(read, family):
    num_params, config = FAMILIES[family]
    assert read(config).num_params == pytest.approx(num_params, rel=0.011)


DENSE = config("new_family", (4, 64, 4, 4, 128, 1000))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_number": 64}, "moe_number = 64 is of a mixture of experts, and no num_local_experts or num_experts"),
        ({"num_ffn_experts": 8, "num_experts_per_tok": 2}, "num_ffn_experts = 8 is of a mixture of experts"),
        ({"num_experts_per_tok": 2, "num_experts": None}, "num_experts_per_tok = 2 is of a mixture of experts"),
        ({"block_types": ["attention", "recurrent"]}, "block_types has recurrent; only full_attention"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type has mamba; only"),
        ({"mlp_layer_types": ["hash_moe"]}, "mlp_layer_types has hash_moe; only"),
        ({"attn_layers": ["local", "lsh"]}, "attn_layers has lsh; only"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern = 'M-M\\*', layers of several kinds"),
        ({"num_hidden_groups": 1}, "num_hidden_groups = 1, layers that share weights"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256, embeddings of every layer"),
        ({"conv_L_cache": 3}, "conv_L_cache = 3, convolutions instead of attention"),
        ({"is_moe": True, "num_experts": 8}, "is_moe = True, experts of one column each"),
    ],
)
def test_layers_that_fields_speak_of_are_never_priced_as_dense_ones(read, fields, words):
    with pytest.raises(InputError, match=words):
        read({**DENSE, **fields})


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_experts": 1, "moe_topk": 1}, {"num_local_experts": 0, "num_experts_per_tok": 0}, {"moe_renorm": True}],
)
def test_dense_models_may_say_that_they_have_no_experts(read, fields):
    spec = read({**DENSE, **fields})
    assert (spec.ffn_size, spec.stored_ffn_size) == (128, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_latent_size": 64}, "moe_latent_size = 64"),
        ({"embedding_size": 16}, "embeddings of another width than the layers"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "layers of sizes of their own"),
        ({"layer_types": ["sliding_attention"]}, "attention in windows (as full attention)"),
        ({"image_size": 224}, "everything but the text model"),
    ],
)
def test_what_costs_simplify_is_said(read, fields, words):
    assert words in read({**DENSE, **fields}).unpriced


def test_a_masked_model_of_several_parts_is_not_causal(read):
    spec = read({"architectures": ["VisionForMaskedLM"], "text_config": DENSE, "vision_config": {"image_size": 8}})
    assert not spec.causal and spec.unpriced.startswith("everything but the text model")
