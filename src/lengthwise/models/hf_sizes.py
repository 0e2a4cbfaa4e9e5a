"""Sizes of a model of any family from its ``config.json``, for costs and plans alone; no torch and no transformers.

``hf_config.read_spec`` refuses what training here would not compute exactly. A price needs less: sizes of the layers,
the experts among them and the windows of attention. What has no price is said in ``ModelSpec.unpriced``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief, read_json
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import read_spec
from lengthwise.models.hf_experts import ffn_columns
from lengthwise.models.hf_fields import TEXT_PARTS, PricedFields

PRICED_ONLY = "generic"
"""The family of models that are priced and not trained."""
_TIED = (
    "gemma", "gpt2", "gpt_bigcode", "falcon", "bloom", "opt", "mpt", "starcoder2", "cohere", "bert", "roberta",
    "nomic_bert",
)  # fmt: skip
"""Beginnings of model types whose embedding and head are one matrix unless their file says otherwise."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "ff_activation", "activation")
_UNGATED = frozenset({"bloom", "falcon", "RefinedWeb", "RefinedWebModel", "ctrl"})
"""Model types whose feed-forward has no gate, though their file may name no activation."""
_GATED = ("gemma", "vaultgemma", "bitnet", "modernbert", "gte")
"""Beginnings of model types whose feed-forward has a gate, whatever their activation."""
_UNGATED_ACTIVATIONS = ("gelu", "relu", "quick_gelu", "xielu")
"""Beginnings of activations that models without a gate use; most with one use SiLU."""
_NO_BIASES = (
    "llama", "mistral", "mixtral", "gemma", "vaultgemma", "qwen3", "phi3", "olmo", "cohere", "granite", "falcon",
    "stablelm", "modernbert",
)  # fmt: skip
"""Beginnings of model types whose linear layers have no biases unless their file says otherwise."""
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention",
    "is_encoder_decoder": "an encoder with a decoder",
    "state_size": "a state-space model",
    "block_configs": "blocks of several sizes",
    "attn_config": "a configuration nested by part",
    "hybrid_override_pattern": "layers of several kinds",
    "hidden_size_per_layer_input": "embeddings of every layer",
    "num_layers_per_stack": "layers that run several times",
    "num_hidden_groups": "layers that share weights",
    "conv_L_cache": "convolutions instead of attention",
    "conv_kernel_size": "convolutions beside attention",
    "lru_width": "recurrent layers",
    "q_groups": "projections in groups",
    "is_moe": "experts of one column each",
    "enable_moe_block": "experts beside a dense feed-forward",
    "use_bottleneck": "narrower layers between wider ones",
}
_SIMPLIFIED = {
    "per_layer_config": "layers of sizes of their own",
    "num_attention_heads_per_layer": "numbers of heads that differ between layers",
    "num_kv_shared_layers": "keys and values that layers share",
    "attention_window": "attention in windows (as full attention)",
    "local_attention": "attention in windows (as full attention)",
    "max_entity_length": "embeddings of entities",
}
"""Fields whose effect on costs is left out, and what is said of it."""
_SIMPLIFIED_FAMILIES = {
    "jetmoe": "experts of attention",
    "xlnet": "relative positions",
    "nystromformer": "approximate attention (as full attention)",
    "yoso": "approximate attention (as full attention)",
    "mra": "approximate attention (as full attention)",
    "big_bird": "sparse attention (as full attention)",
    "roc_bert": "embeddings of shapes and sounds",
    "xmod": "adapters of languages",
    "luke": "entities",
}
_OF_NO_TEXT = ("vision_config", "image_size", "patch_size", "num_channels", "audio_config", "num_mel_bins", "conv_dim")
"""Fields of models that look at pictures or listen."""
ONLY_TEXT = "everything but the text model"
"""What is said of models with other parts."""
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local", "dense", "sparse")
"""Kinds of layers that lists of kinds may name."""
_LISTS_OF_KINDS = ("_types", "_type", "_layers")


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
    nested = next((document[name] for name in TEXT_PARTS if isinstance(document.get(name), dict)), None)
    _refuse_other_inputs(document, nested, path)
    is_part = nested is not None or any(document.get(name) is not None for name in _OF_NO_TEXT)
    is_masked = any(str(name).endswith("ForMaskedLM") for name in PricedFields(document, path).names("architectures"))
    fields = PricedFields(document if nested is None else nested, path)
    return _spec(fields, parts=[ONLY_TEXT] if is_part else [], causal=not is_masked)


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


def _spec(fields: PricedFields, parts: list[str], *, causal: bool) -> ModelSpec:
    _refuse_other_layers(fields)
    values, path = fields.values, fields.path
    hidden_size, num_layers, num_heads = map(fields.needed, ("hidden_size", "num_layers", "num_heads"))
    family = str(values.get("model_type", ""))
    is_gated = _is_gated(values, family)
    dense_size = fields.size("dense_size") or _dense_size(fields, hidden_size, is_gated=is_gated)
    dense_size //= 2 if family == "moshi" else 1  # its ffn_dim counts gate and up projection
    ffn_size, stored_ffn_size, experts = ffn_columns(fields, dense_size, num_layers)
    window, num_window_layers = _windows(fields, family, num_layers)
    unpriced = [*parts, *_simplified(fields, hidden_size, family, window), *experts]
    return ModelSpec(
        name=path.resolve().parent.name,
        family=PRICED_ONLY,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_size=fields.size("head_size") or max(1, hidden_size // num_heads),
        vocab_size=fields.needed("vocab_size"),
        gated_ffn=is_gated,
        tied_embeddings=_is_tied(fields, family),
        causal=causal,
        stored_ffn_size=stored_ffn_size,
        window=window,
        num_window_layers=num_window_layers,
        unpriced=", ".join(dict.fromkeys([*unpriced, *(["biases"] if _has_biases(values, family) else [])])),
    )


def _num_kv_heads(fields: PricedFields, num_heads: int) -> int:
    """Heads of keys and values. Falcon of before its new architecture has one, whatever number its file names."""
    if fields.values.get("multi_query") is True and not fields.values.get("new_decoder_architecture"):
        return 1
    return fields.size("num_kv_heads") or num_heads


def _is_gated(values: Mapping[str, Any], family: str) -> bool:
    """Whether the feed-forward has a gate, by the family and else by the activation."""
    activation = str(next((values[name] for name in _ACTIVATIONS if values.get(name)), "silu"))
    is_ungated = family in _UNGATED or activation.startswith(_UNGATED_ACTIVATIONS)
    return family.startswith(_GATED) or not is_ungated


def _simplified(fields: PricedFields, hidden_size: int, family: str, window: int) -> list[str]:
    """What costs simplify in the model's attention and embeddings, in words."""
    kinds = fields.names("layer_types")
    words = [text for name, text in _SIMPLIFIED.items() if fields.values.get(name)]
    if family in _SIMPLIFIED_FAMILIES:
        words.append(_SIMPLIFIED_FAMILIES[family])
    if "chunked_attention" in kinds:
        words.append("chunked attention (as full attention)")
    if "sliding_attention" in kinds and not window:
        words.append("attention in windows (as full attention)")
    if (fields.size("embedding_size") or hidden_size) != hidden_size:
        words.append("embeddings of another width than the layers")
    return words


def _has_biases(values: Mapping[str, Any], family: str) -> bool:
    """Whether linear layers add biases: as any field says, else as the family does; unknown ones may."""
    said = [
        value != name.startswith("no_")
        for name, value in values.items()
        if name.endswith("bias") and isinstance(value, bool)
    ]
    return any(said) if said else not family.startswith(_NO_BIASES)


def _dense_size(fields: PricedFields, hidden_size: int, *, is_gated: bool) -> int:
    """Columns of a dense feed-forward; families of GPT-2's time leave out that they have four times the hidden size."""
    if fields.size("ffn_size") is None and not is_gated:
        return 4 * hidden_size
    return fields.needed("ffn_size")


def _is_tied(fields: PricedFields, family: str) -> bool:
    """Whether embedding and head are one matrix."""
    is_tied = fields.values.get("tie_word_embeddings", family.startswith(_TIED))
    if not isinstance(is_tied, bool):
        raise InputError(f"{fields.path}: tie_word_embeddings must be true or false, not {brief(is_tied)}")
    return is_tied


def _refuse_other_inputs(document: Mapping[str, Any], nested: Mapping[str, Any] | None, path: Path) -> None:
    """Refuse models of pictures or sound alone, and those that only compare them with texts, as CLIP does."""
    seen = next((name for name in _OF_NO_TEXT if document.get(name) is not None), None)
    classes = [str(name) for name in PricedFields(document, path).names("architectures")]
    is_headless = bool(classes) and all(name.endswith("Model") and not name.endswith("HeadModel") for name in classes)
    is_other = is_headless if nested is not None else document.get("vocab_size") is None
    if seen is not None and is_other:
        raise InputError(
            f"{path} is that of no language model{f' ({classes[0]})' if classes else ''}: it has {seen}, and commands "
            "price and train models of token ids alone; lengthwise.prepare trains others, by inputs=, slot_tokens= and "
            "loss="
        )


def _refuse_other_layers(fields: PricedFields) -> None:
    """Refuse layers that are no attention over keys and values of heads with a feed-forward behind it."""
    values, path = fields.values, fields.path
    for name, words in _REFUSED.items():
        if values.get(name):
            raise InputError(f"{path}: {name} = {brief(values[name], 40)}, {words}, has no cost model")
    mixer = next((name for name in values if name.startswith(("mamba_", "ssm_", "linear_"))), None)
    if mixer:
        raise InputError(f"{path}: {mixer}: layers without attention, such as state-space layers, have no cost model")
    for name, kinds in values.items():
        if not name.endswith(_LISTS_OF_KINDS) or not isinstance(kinds, list):
            continue
        if other := sorted({kind for kind in kinds if isinstance(kind, str)} - set(_KINDS)):
            raise InputError(f"{path}: {name} has {other[0][:40]}; only {', '.join(_KINDS)} have a cost model")


def _windows(fields: PricedFields, family: str, num_layers: int) -> tuple[int, int]:
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
