"""Hugging Face's ``config.json`` to :class:`ModelSpec` and back. What cannot be computed exactly is refused by name.

Dropout is not: GPT-2's and BERT's published files have it, it changes no evaluation, and nothing is dropped here.
Imports no torch: planning for a model in a folder needs its sizes alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError, Setting
from lengthwise.core.read_file import brief, read_json
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_values import check_same_layers, check_values, rope_by_layer

AS_IT_IS = (
    f"lengthwise train with {Setting.IMPLEMENTATION}=auto, lengthwise.prepare and lengthwise.Trainer train such models "
    "as transformers has them"
)
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "GPT2LMHeadModel": "gpt2",
    "BertForMaskedLM": "bert",
}
# Fields that must have one of these values where they are present, by family.
_ROTARY_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "is_causal": (True, None),
    "partial_rotary_factor": (1, None),
}
_REQUIRED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _ROTARY_REQUIRED,
    "qwen2": _ROTARY_REQUIRED,
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
        "quantization_config": (None,),
    },
    "bert": {
        "hidden_act": ("gelu", None),
        "type_vocab_size": (2, None),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
        "quantization_config": (None,),
    },
}
# What transformers reads as another name of a field of GPT-2's.
_GPT2_ALIASES = ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported rope types and the parameters each needs beyond theta."""
# What training here did not have; entries that the caller may override.
_UNUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": None},
}
_DEFAULT_THETA = 10_000.0
_CONTEXT = "original_max_position_embeddings"


class UnsupportedModelError(InputError):
    """A model of a family, or with a feature, that this library's own implementation does not have."""


def read_spec(folder: str | Path) -> ModelSpec:
    """The sizes of the model in a Hugging Face folder, from its ``config.json``; named after the folder.

    Reads both transformers 5 (``rope_parameters``) and older files (``rope_theta``, ``rope_scaling``).

    Raises:
        InputError: no such file, or one that no model can have.
        UnsupportedModelError: a field whose effect the model would not have; the message names it.
    """
    config, path = read_config(folder), Path(folder) / "config.json"
    kind = _architecture(config, path)
    check_same_layers(config, path)
    for field, allowed in _REQUIRED[kind].items():
        if config.get(field) not in allowed:
            raise UnsupportedModelError(
                f"{path}: {field} = {brief(config.get(field))} is not supported; only {allowed[0]!r} is. {AS_IT_IS}"
            )
    read = {"gpt2": _read_gpt2, "bert": _read_bert}.get(kind, _read_llama)
    try:
        return read(config, path)
    except KeyError as missing:
        raise InputError(f"{path} lacks {missing.args[0]}") from None


def read_config(folder: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face folder, without fields that are null, its values checked.

    Raises:
        InputError: no such file, or a value that no model can have.
    """
    path = Path(folder) / "config.json"
    try:
        return check_values(read_json(path, what="a model's configuration", finite=False), path)
    except OSError as error:
        raise InputError(f"{path} cannot be read as a model's configuration: {error}") from None


def _read_llama(config: Mapping[str, Any], path: Path) -> ModelSpec:
    qwen2 = _architecture(config, path) == "qwen2"
    if config.get("attention_bias") and not qwen2:
        raise UnsupportedModelError(
            f"{path}: attention_bias = true puts a bias on o_proj, which is not supported. {AS_IT_IS}"
        )
    _refuse_sliding_window(config, path)
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    if not num_heads:
        raise InputError(f"{path}: num_attention_heads must be at least 1, not 0")
    theta, scaling = _rope(config, path)
    spec = ModelSpec(
        name=path.resolve().parent.name,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden_size,
        ffn_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_size=config.get("head_dim") or hidden_size // num_heads,
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )
    check_rope(spec)
    return spec


def _read_gpt2(config: Mapping[str, Any], path: Path) -> ModelSpec:
    return ModelSpec(
        **_learned_positions(config, path, hidden_size=config["n_embd"], num_heads=config["n_head"]),
        family="gpt",
        num_layers=config["n_layer"],
        ffn_size=config.get("n_inner") or 4 * config["n_embd"],
        max_positions=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _read_bert(config: Mapping[str, Any], path: Path) -> ModelSpec:
    mask = config.get("mask_token_id")
    if mask is not None and not (type(mask) is int and 0 <= mask < config["vocab_size"]):
        raise InputError(f"{path}: mask_token_id = {brief(mask)} is not one of the {config['vocab_size']:,} token ids")
    sizes = _learned_positions(config, path, hidden_size=config["hidden_size"], num_heads=config["num_attention_heads"])
    return ModelSpec(
        **sizes,
        family="bert",
        causal=False,
        num_layers=config["num_hidden_layers"],
        ffn_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config.get("layer_norm_eps", 1e-12),
        mask_token_id=mask,
    )


def _learned_positions(config: Mapping[str, Any], path: Path, *, hidden_size: int, num_heads: int) -> dict[str, Any]:
    """What GPT-2 and BERT share."""
    if not num_heads or hidden_size % num_heads:
        raise InputError(f"{path}: {num_heads} heads cannot share a hidden size of {hidden_size} evenly")
    return {
        "name": path.resolve().parent.name,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": hidden_size // num_heads,
        "vocab_size": config["vocab_size"],
        "gated_ffn": False,
        "qkv_bias": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def check_rope(spec: ModelSpec) -> str:
    """The rope type of ``spec``.

    Raises:
        InputError: the type is not in ``ROPE_PARAMETERS``, lacks a parameter, or the head size is odd.
    """
    scaling = dict(spec.rope_scaling)
    kind = str(scaling.get("rope_type", "default"))
    if kind not in ROPE_PARAMETERS:
        raise InputError(
            f"model {spec.name}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_PARAMETERS)}"
        )
    missing = [key for key in ROPE_PARAMETERS[kind] if key not in scaling]
    if missing:
        raise InputError(f"model {spec.name}: rope_type {kind} needs {' and '.join(missing)}")
    if spec.head_size % 2:
        raise InputError(f"model {spec.name}: rotary embeddings need an even head_size, not {spec.head_size}")
    return kind


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architectures = {brief(names)} is not supported; supported: {', '.join(_ARCHITECTURES)}. "
            + AS_IT_IS
        )
    return _ARCHITECTURES[names[0]]


def _refuse_sliding_window(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a sliding window unless no layer uses it, as in Qwen2 files that carry it switched off."""
    kinds = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError(
            f"{path}: layer_types has {sorted(set(kinds))}; only full_attention is supported. {AS_IT_IS}"
        )
    used = config.get("use_sliding_window", False) and not kinds
    if used and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0):
        raise UnsupportedModelError(
            f"{path}: use_sliding_window = true is not supported; only full attention is. {AS_IT_IS}"
        )


def _rope(config: Mapping[str, Any], path: Path) -> tuple[float, tuple[tuple[str, float | str], ...]]:
    """Theta, and the sorted items beyond it (none for plain rotary embeddings)."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})  # transformers' precedence
    if kinds := rope_by_layer(rope):
        raise UnsupportedModelError(
            f"{path}: rotary parameters by type of layer ({', '.join(kinds)}) are not supported. {AS_IT_IS}"
        )
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or _DEFAULT_THETA)
    legacy = rope.pop("type", None)
    kind = rope.setdefault("rope_type", legacy or "default")
    if kind not in ROPE_PARAMETERS:
        raise UnsupportedModelError(
            f"{path}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_PARAMETERS)}. {AS_IT_IS}"
        )
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise UnsupportedModelError(f"{path}: partial_rotary_factor below 1 is not supported. {AS_IT_IS}")
    if kind == "default":
        return theta, ()
    if kind == "llama3":
        rope.setdefault(_CONTEXT, config.get("max_position_embeddings"))
    values = {key: float(rope[key]) for key in ROPE_PARAMETERS[kind] if rope.get(key) is not None}
    return theta, tuple(sorted({**values, "rope_type": kind}.items()))


def hf_config(spec: ModelSpec, *, dtype: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The ``config.json`` of ``spec``; ``extra`` adds entries but overrides none that ``spec`` decides.

    Raises:
        InputError: transformers has no model of this family and these sizes.
    """
    makers = {"llama": _llama_config, "gpt": _gpt2_config, "bert": _bert_config}
    if spec.family not in makers:
        raise InputError(
            f"model {spec.name}: transformers has no {spec.family}; only {', '.join(makers)} are exchanged"
        )
    extra_keys = dict(extra or {})
    if spec.family == "gpt":
        extra_keys = {key: value for key, value in extra_keys.items() if key not in _GPT2_ALIASES}
    common = {"dtype": dtype, "vocab_size": spec.vocab_size, "tie_word_embeddings": spec.tied_embeddings}
    defaults = {"bos_token_id": None, "eos_token_id": None, **_UNUSED[spec.family]}
    return {**defaults, **extra_keys, **makers[spec.family](spec), **common}


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", **dict(spec.rope_scaling)}
    if _CONTEXT in rope:
        rope[_CONTEXT] = int(rope[_CONTEXT])  # transformers wants an integer here and floats elsewhere
    sizes: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if spec.qkv_bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if spec.qkv_bias else "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        # Both spellings: transformers 5 reads the first, older versions and other readers the other two.
        "rope_parameters": {"rope_theta": spec.rope_theta, **rope},
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope if spec.rope_scaling else None,
    }
    if spec.qkv_bias:
        return sizes | {"use_sliding_window": False}
    return sizes | {"attention_bias": False, "mlp_bias": False}


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    _check_heads(spec)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": spec.hidden_size,
        "n_inner": spec.ffn_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_positions": spec.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_eps,
    }


def _bert_config(spec: ModelSpec) -> dict[str, Any]:
    _check_heads(spec)
    mask = {} if spec.mask_token_id is None else {"mask_token_id": spec.mask_token_id}
    return mask | {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "max_position_embeddings": spec.max_positions,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": spec.norm_eps,
    }


def _check_heads(spec: ModelSpec) -> None:
    """GPT-2 and BERT have heads of one size that make up the hidden size, each with its own keys and values."""
    if spec.num_kv_heads != spec.num_heads or spec.num_heads * spec.head_size != spec.hidden_size:
        raise InputError(
            f"model {spec.name} is no {spec.family} of transformers, where heads make up the hidden size and have keys "
            f"of their own: it has {spec.num_heads} heads of {spec.head_size}, {spec.num_kv_heads} key/value heads "
            f"and a hidden size of {spec.hidden_size}"
        )


def write_config(spec: ModelSpec, path: Path, *, dtype: str, extra: Mapping[str, Any]) -> None:
    """Write ``config.json`` for ``spec``."""
    path.write_text(json.dumps(hf_config(spec, dtype=dtype, extra=extra), indent=2) + "\n")
