"""Hugging Face's ``config.json`` to :class:`ModelSpec` and back. What cannot be computed exactly is refused by name.

Imports no torch: planning for a model in a folder needs its sizes alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
# Fields that must have one of these values where they are present.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "is_causal": (True, None),
    "partial_rotary_factor": (1, None),
}
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported rope types and the parameters each needs beyond theta."""
_DEFAULT_THETA = 10_000.0
_CONTEXT = "original_max_position_embeddings"


def read_spec(folder: str | Path) -> ModelSpec:
    """The sizes of the model in a Hugging Face folder, from its ``config.json``; named after the folder.

    Reads both transformers 5 (``rope_parameters``) and older files (``rope_theta``, ``rope_scaling``).

    Raises:
        InputError: no such file, or a field whose effect the model would not have; the message names it.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a model's configuration: {error}") from None
    qwen2 = _architecture(config, path) == "qwen2"
    for field, allowed in _REQUIRED.items():
        if config.get(field) not in allowed:
            raise InputError(f"{path}: {field} = {config[field]!r} is not supported; only {allowed[0]!r} is")
    if config.get("attention_bias") and not qwen2:
        raise InputError(f"{path}: attention_bias = true puts a bias on o_proj, which is not supported")
    _refuse_sliding_window(config, path)
    try:
        num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
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
    except KeyError as missing:
        raise InputError(f"{path} lacks {missing.args[0]}") from None
    check_rope(spec)
    return spec


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
        raise InputError(f"{path}: architectures = {names} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[names[0]]


def _refuse_sliding_window(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a sliding window unless no layer uses it, as in Qwen2 files that carry it switched off."""
    kinds = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise InputError(f"{path}: layer_types has {sorted(set(kinds))}; only full_attention is supported")
    used = config.get("use_sliding_window", False) and not kinds
    if used and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0):
        raise InputError(f"{path}: use_sliding_window = true is not supported; only full attention is")


def _rope(config: Mapping[str, Any], path: Path) -> tuple[float, tuple[tuple[str, float | str], ...]]:
    """Theta, and the sorted items beyond it (none for plain rotary embeddings)."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})  # transformers' precedence
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or _DEFAULT_THETA)
    legacy = rope.pop("type", None)
    kind = rope.setdefault("rope_type", legacy or "default")
    if kind not in ROPE_PARAMETERS:
        raise InputError(f"{path}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_PARAMETERS)}")
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise InputError(f"{path}: partial_rotary_factor below 1 is not supported")
    if kind == "default":
        return theta, ()
    if kind == "llama3":
        rope.setdefault(_CONTEXT, config.get("max_position_embeddings"))
    values = {key: float(rope[key]) for key in ROPE_PARAMETERS[kind] if rope.get(key) is not None}
    return theta, tuple(sorted({**values, "rope_type": kind}.items()))


def hf_config(spec: ModelSpec, *, dtype: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The ``config.json`` of ``spec``; ``extra`` adds entries but overrides none that ``spec`` decides."""
    rope: dict[str, Any] = {"rope_type": "default", **dict(spec.rope_scaling)}
    if _CONTEXT in rope:
        rope[_CONTEXT] = int(rope[_CONTEXT])  # transformers wants an integer here and floats elsewhere
    sizes: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if spec.qkv_bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if spec.qkv_bias else "llama",
        "dtype": dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        # Both spellings: transformers 5 reads the first, older versions and other readers the other two.
        "rope_parameters": {"rope_theta": spec.rope_theta, **rope},
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope if spec.rope_scaling else None,
    }
    if spec.qkv_bias:
        sizes["use_sliding_window"] = False
    else:
        sizes |= {"attention_bias": False, "mlp_bias": False}
    defaults = {"bos_token_id": None, "eos_token_id": None}
    return {**defaults, **(extra or {}), **sizes}


def write_config(spec: ModelSpec, path: Path, *, dtype: str, extra: Mapping[str, Any]) -> None:
    """Write ``config.json`` for ``spec``."""
    path.write_text(json.dumps(hf_config(spec, dtype=dtype, extra=extra), indent=2) + "\n")
