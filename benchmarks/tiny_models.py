"""Tiny randomly initialised models of every class that transformers exports for text, in float64 without dropout."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

VOCAB_SIZE = 61
NUM_LABELS = 3
"""Classes of a classification head."""
HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 32, 4, 2, 3
HEAD_SIZE = HIDDEN_SIZE // NUM_HEADS
MAX_POSITIONS = 64

_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "hidden_dim", "emb_dim"), HIDDEN_SIZE
    ),
    **dict.fromkeys(
        ("embed_dim", "word_embed_proj_dim", "attention_hidden_size", "lru_width", "input_size"), HIDDEN_SIZE
    ),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "cross_attention_hidden_size"), HIDDEN_SIZE),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), NUM_HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), NUM_KV_HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dim_feedforward", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "d_inner", "intermediate_dim"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim", "d_head", "d_kv"), HEAD_SIZE),
    **dict.fromkeys(
        ("qk_rope_head_dim", "kv_channels", "rotary_dim", "mamba_d_head", "linear_key_head_dim"), HEAD_SIZE
    ),
    **dict.fromkeys(("linear_head_dim", "linear_value_head_dim", "global_head_dim", "swa_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), MAX_POSITIONS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_ssm"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), NUM_KV_HEADS),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_num_groups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_chunk"), 16),
    "type_vocab_size": 2,
    "n_shared_experts": 1,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
    "sliding_window": 6,
    "attention_chunk_size": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "entity_vocab_size": 16,
    "num_kv_shared_layers": 0,
    "use_mamba_kernels": False,
    "use_cache": False,
}
_WHERE_UNSET = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Sizes that some classes cannot do without although their configuration leaves them out."""
SPECIAL_TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 4, "mask_token_id": 5}
"""Token ids of the corpus begin after these."""
FIRST_TOKEN = 6

_MAMBA_2 = {"expand": 2, "num_heads": 8, "head_dim": 8}
_ZAMBA = {"layer_types": ["mamba", "hybrid", "mamba"], "attention_head_dim": 16, "attention_hidden_size": 64}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "DbrxConfig": {"attn_config": {"kv_n_heads": NUM_KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8}},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1},
    "EsmConfig": {"vocab_size": VOCAB_SIZE, "pad_token_id": 1, "mask_token_id": 5},
    "EsmcConfig": {"num_key_value_heads": NUM_HEADS},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 6},
    "LayoutLMv3Config": {"coordinate_size": 4, "shape_size": 8, "visual_embed": False},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv"]},
    "LiltConfig": {"hidden_size": 48},
    "Mamba2Config": {"expand": 2, "num_heads": 8, "head_dim": 8},
    "LongcatFlashConfig": {"zero_expert_num": 2, "expert_ffn_hidden_size": 48},
    "LongformerConfig": {"attention_window": 8},
    "Mistral4Config": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        }
    },
    "NeoMMEConfig": {"hidden_act": "relu2", "head_dim": 16},
    "PerceiverConfig": {"d_latents": HIDDEN_SIZE, "num_latents": 8, "num_self_attends_per_block": NUM_LAYERS},
    "Qwen4ExpConfig": {"hidden_act": "silu"},
    "Qwen4ExpTextConfig": {"hidden_act": "silu"},
    "ReformerConfig": {"axial_pos_embds": False},
    "T5Config": {"decoder_start_token_id": 0},
    "XmodConfig": {"languages": ("en_XX",), "default_language": "en_XX"},
    "Zamba2Config": {**_ZAMBA, "hybrid_layer_ids": [1], "mamba_headdim": 8},
    "ZambaConfig": {**_ZAMBA, "n_mamba_heads": 2},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
"""Settings of configurations whose sizes depend on each other, by the class of the configuration."""


@dataclass(frozen=True, kw_only=True)
class ModelClass:
    """A class that one of transformers' auto mappings names."""

    kind: str
    """``causal``, ``masked``, ``tokens`` or ``sequences``: which mapping."""
    name: str

    def load(self) -> type[nn.Module]:
        """The class itself."""
        import transformers

        return getattr(transformers, self.name)


def all_classes(kinds: tuple[str, ...] = ("causal", "masked", "tokens", "sequences")) -> Iterator[ModelClass]:
    """Each class once per kind, by name."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tasks = {
        "causal": "CAUSAL_LM", "masked": "MASKED_LM", "tokens": "TOKEN_CLASSIFICATION",
        "sequences": "SEQUENCE_CLASSIFICATION",
    }  # fmt: skip
    seen: set[str] = set()
    for kind in kinds:
        mapping = getattr(auto, f"MODEL_FOR_{tasks[kind]}_MAPPING_NAMES")
        names = {name for entry in mapping.values() for name in ((entry,) if isinstance(entry, str) else entry)}
        for name in sorted(names - seen):
            seen.add(name)
            yield ModelClass(kind=kind, name=name)


def build(model_class: ModelClass) -> nn.Module:
    """The model with its weights drawn from a fixed seed, in float64, in training mode."""
    torch.manual_seed(0)
    loaded = model_class.load()
    config = tiny_config(loaded.config_class)
    if hasattr(config, "is_decoder"):
        config.is_decoder = model_class.kind == "causal"
    model = loaded(config)
    model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products of matrices do not take float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(torch.nan_to_num(parameter) + 0.1 * noise)
    for module in model.modules():
        for name in vars(module):
            if ("drop" in name or "jitter" in name) and isinstance(getattr(module, name), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def tiny_config(config_class: Any, depth: int = 0) -> Any:
    """A configuration of ``config_class`` and its parts with few small layers."""
    default = config_class()
    values: dict[str, Any] = {}
    parameters = set(signature(config_class.__init__).parameters) | set(vars(default)) | set(_fields(config_class))
    for name, size in (_SIZES | {"vocab_size": VOCAB_SIZE}).items():
        current = _value(default, name)
        is_set = current is not None and not isinstance(current, list | dict)
        if name in parameters and (is_set or (current is None and name in _WHERE_UNSET)):
            values[name] = size
    if "kv_lora_rank" in parameters:  # latent attention has no groups of heads
        values["num_key_value_heads"] = NUM_HEADS
    for name, token in SPECIAL_TOKENS.items():
        if isinstance(getattr(default, name, None), int):
            values[name] = token
    for name in vars(default):
        if ("drop" in name or "jitter" in name) and isinstance(getattr(default, name), float):
            values[name] = 0.0
    if getattr(default, "pad_token_id", None) is None and depth == 0:
        values["pad_token_id"] = SPECIAL_TOKENS["pad_token_id"]
    for name in getattr(config_class, "sub_configs", None) or {}:
        current = getattr(default, name, None)
        if current is not None and depth < 3:
            values[name] = tiny_config(type(current), depth + 1)
    if depth == 0:
        values["num_labels"] = NUM_LABELS
    values |= _EXCEPTIONS.get(config_class.__name__, {})
    return config_class(**values)


def _value(config: Any, name: str) -> Any:
    """A setting, one of its values where layers have different ones."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to answer for all layers at once
        return next(iter(vars(config).get("per_layer_config", {}).values()), HIDDEN_SIZE)


def _fields(config_class: Any) -> list[str]:
    return [name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})]
