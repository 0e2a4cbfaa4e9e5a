"""Sizes of a model of any family from its ``config.json``, for costs and plans alone; no torch and no transformers.

``hf_config.read_spec`` refuses what training here would not compute exactly. A price needs less: sizes of the layers,
the experts among them and the windows of attention. What has no price is said in ``ModelSpec.unpriced``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief, read_json
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import read_spec
from lengthwise.models.hf_values import MAX_SIZE

PRICED_ONLY = "generic"
"""The family of models that are priced and not trained."""
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner", "dff"),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_size": ("moe_intermediate_size",),
    "shared_size": ("shared_expert_intermediate_size",),
    "num_shared": ("n_shared_experts", "num_shared_experts"),
    "dense_size": ("intermediate_size_mlp",),
    "first_dense": ("first_k_dense_replace",),
    "moe_every": ("decoder_sparse_step", "interleave_moe_layer_step"),
    "window": ("sliding_window",),
    "window_pattern": ("sliding_window_pattern",),
    "full_before": ("max_window_layers",),
}
"""What is read, and what families call it."""
_TEXT = ("text_config", "llm_config", "language_config")
_TIED = ("gemma", "gpt2", "gpt_bigcode", "falcon", "bloom", "opt", "mpt", "starcoder2", "cohere", "bert", "roberta")
"""Beginnings of model types whose embedding and head are one matrix unless their file says otherwise."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "ff_activation", "activation")
_UNGATED = frozenset({"bloom", "falcon", "RefinedWeb", "RefinedWebModel", "ctrl"})
"""Model types whose feed-forward has no gate, though their file may name no activation."""
_NO_BIASES = (
    "llama",
    "mistral",
    "mixtral",
    "gemma",
    "qwen3",
    "phi3",
    "olmo",
    "cohere",
    "granite",
    "falcon",
    "stablelm",
)
"""Beginnings of model types whose linear layers have no biases unless their file says otherwise."""
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention",
    "is_encoder_decoder": "an encoder with a decoder",
    "state_size": "a state-space model",
    "block_configs": "blocks of several sizes",
    "attn_config": "a configuration nested by part",
}
_OF_NO_TEXT = ("vision_config", "image_size", "patch_size", "num_channels", "audio_config", "num_mel_bins", "conv_dim")
"""Fields of models that look at pictures or listen."""
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class _Fields:
    """The fields of a configuration, by any name that a family gives them."""

    values: Mapping[str, Any]
    path: Path

    def size(self, what: str) -> int | None:
        """The whole number that says ``what``, or None.

        Raises:
            InputError: it is something else.
        """
        for name in _NAMES[what]:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, list | dict) and value:
                    raise InputError(
                        f"{self.path}: {name} = {brief(value, 40)}: layers or parts of sizes of their own have no cost "
                        "model"
                    )
                if type(value) is not int or not 0 <= value <= MAX_SIZE:
                    raise InputError(
                        f"{self.path}: {name} must be a whole number from 0 to {MAX_SIZE:,}, not {brief(value)}"
                    )
                return value
        return None

    def needed(self, what: str) -> int:
        """The number that says ``what``, at least 1.

        Raises:
            InputError: there is none; the message lists the names it may have.
        """
        value = self.size(what)
        if not value:
            names = " or ".join(_NAMES[what])
            raise InputError(f"{self.path} lacks {names}" if value is None else f"{self.path}: {names} is 0")
        return value

    def names(self, field: str) -> list[Any]:
        """The list in ``field``; empty where there is none."""
        value = self.values.get(field) or []
        if not isinstance(value, list):
            raise InputError(f"{self.path}: {field} must be a list, not {brief(value)}")
        return value


def read_priced_spec(folder: Path) -> ModelSpec:
    """The sizes of the model in a Hugging Face folder of any family; named after the folder.

    Raises:
        InputError: no such file, a size is missing or is no number, or the model has another kind of layers.
    """
    try:
        return read_spec(folder)  # what can be trained is priced with all its details
    except InputError:
        path = folder / "config.json"
    try:
        document = read_json(path, what="a model's configuration", finite=False)
    except FileNotFoundError:
        raise InputError(f"{path.parent} holds no config.json, which says the sizes of a model") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read as a model's configuration: {error.strerror}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a model's configuration: it holds {brief(document)}, not an object")
    nested = next((document[name] for name in _TEXT if isinstance(document.get(name), dict)), None)
    _refuse_other_inputs(document, nested, path)
    return _spec(_Fields(nested or document, path), parts=[] if nested is None else ["everything but the text model"])


def is_causal_and_own(spec: ModelSpec) -> bool:
    """Whether sequences of a micro-batch that ranks share may be on one of them: no token sees later ones, and training
    is by this library's own layers.
    """
    return spec.causal and spec.family != PRICED_ONLY


def has_slices(spec: ModelSpec) -> bool:
    """Whether micro-batches may be computed in slices: no token sees later ones, and of models that transformers
    computes all tokens see all before them, and no router balances experts over all tokens.
    """
    return is_causal_and_own(spec) or (spec.causal and has_dense_layers(spec) and not spec.window)


def has_dense_layers(spec: ModelSpec) -> bool:
    """Whether every token is multiplied by all weights of a layer, and not by those of some experts: such products are
    those that split backwards leave for later, whoever computes them.
    """
    return spec.stored_ffn_size in (0, spec.ffn_size)


def _spec(fields: _Fields, parts: list[str]) -> ModelSpec:
    _refuse_other_layers(fields)
    values, path = fields.values, fields.path
    hidden_size, num_layers, num_heads = map(fields.needed, ("hidden_size", "num_layers", "num_heads"))
    one_kv_head = values.get("multi_query") is True and not values.get("new_decoder_architecture")
    family = str(values.get("model_type", ""))
    activation = next((values[name] for name in _ACTIVATIONS if values.get(name)), "silu")
    is_ungated = family in _UNGATED or str(activation).startswith(("gelu", "relu", "quick_gelu"))
    is_gated = family.startswith("gemma") or not is_ungated
    dense_size = fields.size("dense_size") or _dense_size(fields, hidden_size, is_gated=is_gated)
    ffn_size, stored_ffn_size, experts = _ffn_columns(fields, dense_size, num_layers)
    window, num_window_layers = _windows(fields, family, num_layers)
    if "chunked_attention" in fields.names("layer_types"):
        parts.append("chunked attention (as full attention)")
    return ModelSpec(
        name=path.resolve().parent.name,
        family=PRICED_ONLY,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_kv_heads") or (1 if one_kv_head else num_heads),
        head_size=fields.size("head_size") or max(1, hidden_size // num_heads),
        vocab_size=fields.needed("vocab_size"),
        gated_ffn=is_gated,
        tied_embeddings=_is_tied(fields, family),
        causal=not any(str(name).endswith("ForMaskedLM") for name in fields.names("architectures")),
        stored_ffn_size=stored_ffn_size,
        window=window,
        num_window_layers=num_window_layers,
        unpriced=", ".join([*parts, *experts, *(["biases"] if _has_biases(values, family) else [])]),
    )


def _has_biases(values: Mapping[str, Any], family: str) -> bool:
    """Whether linear layers add biases: as any field says, else as the family does; unknown ones may."""
    said = [
        value != name.startswith("no_")
        for name, value in values.items()
        if name.endswith("bias") and isinstance(value, bool)
    ]
    return any(said) if said else not family.startswith(_NO_BIASES)


def _dense_size(fields: _Fields, hidden_size: int, *, is_gated: bool) -> int:
    """Columns of a dense feed-forward; families of GPT-2's time leave out that they have four times the hidden size."""
    if fields.size("ffn_size") is None and not is_gated:
        return 4 * hidden_size
    return fields.needed("ffn_size")


def _is_tied(fields: _Fields, family: str) -> bool:
    """Whether embedding and head are one matrix."""
    is_tied = fields.values.get("tie_word_embeddings", family.startswith(_TIED))
    if not isinstance(is_tied, bool):
        raise InputError(f"{fields.path}: tie_word_embeddings must be true or false, not {brief(is_tied)}")
    return is_tied


def _refuse_other_inputs(document: Mapping[str, Any], nested: Mapping[str, Any] | None, path: Path) -> None:
    """Refuse models of pictures or sound alone, and those that only compare them with texts, as CLIP does."""
    seen = next((name for name in _OF_NO_TEXT if document.get(name) is not None), None)
    classes = [str(name) for name in _Fields(document, path).names("architectures")]
    is_headless = bool(classes) and all(name.endswith("Model") and not name.endswith("HeadModel") for name in classes)
    is_other = is_headless if nested is not None else document.get("vocab_size") is None
    if seen is not None and is_other:
        raise InputError(
            f"{path} is that of no language model{f' ({classes[0]})' if classes else ''}: it has {seen}, and commands "
            "price and train models of token ids alone; lengthwise.prepare trains others, by inputs=, slot_tokens= and "
            "loss="
        )


def _refuse_other_layers(fields: _Fields) -> None:
    """Refuse layers that are no attention over keys and values of heads with a feed-forward behind it."""
    values, path = fields.values, fields.path
    for name, words in _REFUSED.items():
        if values.get(name):
            raise InputError(f"{path}: {name} = {brief(values[name], 40)}, {words}, has no cost model")
    mixer = next((name for name in values if name.startswith(("mamba_", "ssm_", "linear_"))), None)
    if mixer:
        raise InputError(f"{path}: {mixer}: layers without attention, such as state-space layers, have no cost model")
    if other := sorted({str(kind) for kind in fields.names("layer_types")} - set(_LAYER_TYPES)):
        raise InputError(f"{path}: layer_types has {other[0]}; only {', '.join(_LAYER_TYPES)} have a cost model")


def _ffn_columns(fields: _Fields, dense_size: int, num_layers: int) -> tuple[int, int, list[str]]:
    """Feed-forward columns that a token uses and that a layer stores, as means over layers, and what has no price."""
    num_experts = fields.size("num_experts") or 0
    if num_experts < 2:
        return dense_size, 0, []
    expert_size = fields.size("expert_size") or fields.size("ffn_size") or dense_size
    per_token = fields.needed("experts_per_token")
    if per_token > num_experts:
        raise InputError(f"{fields.path}: {per_token} experts per token of {num_experts} are too many")
    is_llama4 = fields.size("dense_size") is not None  # the one family with a shared expert that no field counts
    shared_size = fields.size("shared_size") or (fields.size("num_shared") or is_llama4) * expert_size
    num_sparse = _num_sparse_layers(fields, num_layers)
    dense = (num_layers - num_sparse) * dense_size
    used, stored = (
        round((dense + num_sparse * (count * expert_size + shared_size)) / num_layers)
        for count in (per_token, num_experts)
    )
    words = ["routing between experts"]
    if num_sparse < num_layers:
        words.append(f"the difference between {num_layers - num_sparse} dense and {num_sparse} expert layers")
    return used, stored, words


def _num_sparse_layers(fields: _Fields, num_layers: int) -> int:
    """How many layers are mixtures of experts."""
    frequency = fields.values.get("moe_layer_freq")
    if isinstance(frequency, list):
        return min(num_layers, sum(bool(flag) for flag in frequency))
    if named := fields.names("moe_layers"):
        return min(num_layers, len(named))
    every = fields.size("moe_every") or (frequency if type(frequency) is int and frequency > 0 else 1)
    dense = {layer for layer in fields.names("mlp_only_layers") if type(layer) is int}
    return sum(
        (layer + 1) % every == 0 and layer not in dense for layer in range(fields.size("first_dense") or 0, num_layers)
    )


def _windows(fields: _Fields, family: str, num_layers: int) -> tuple[int, int]:
    """Tokens that a layer with sliding-window attention sees, and how many such layers there are."""
    window, kinds = fields.size("window") or 0, fields.names("layer_types")
    if not window or (fields.values.get("use_sliding_window") is False and not kinds):
        return 0, 0
    pattern = fields.size("window_pattern") or {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}.get(family)
    if kinds:
        count = min(num_layers, kinds.count("sliding_attention"))
    elif pattern:
        count = num_layers - num_layers // pattern
    else:
        count = num_layers - min(num_layers, fields.size("full_before") or 0)
    return (window, count) if count else (0, 0)
