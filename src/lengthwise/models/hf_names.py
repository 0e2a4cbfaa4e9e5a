"""What Hugging Face calls our weights, by family.

Weights map one to one but for queries, keys and values: three tensors of theirs, in GPT-2 one. Llama, Qwen2 and BERT
store a matrix as [outputs, inputs], GPT-2 as [inputs, outputs].
"""

import re
from dataclasses import dataclass, replace

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec

_HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The names of one family."""

    of_model: dict[str, str]
    """Our weight outside the layers -> theirs."""
    layers: str
    """What comes before a layer's number."""
    of_layer: dict[str, tuple[str, ...]]
    """The last part of our weight's name -> theirs."""
    transposed: tuple[str, ...]
    """Last parts of the weights that they store the other way round."""
    passed_over: str
    """Pattern of tensors in their files that no computation of ours needs."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of older names, and what stands in their place today."""

    def of(self, name: str) -> tuple[str, ...]:
        """Their tensors that make up our weight ``name``: one, or queries, keys and values."""
        if name in self.of_model:
            return (self.of_model[name],)
        _, number, kind = name.split(".")
        return tuple(f"{self.layers}.{number}.{theirs}" for theirs in self.of_layer[kind])

    def today(self, theirs: str) -> str:
        """The present name of a tensor of theirs."""
        for pattern, replacement in self.renamed:
            theirs = re.sub(pattern, replacement, theirs)
        return theirs

    def is_passed_over(self, theirs: str, *, is_tied: bool) -> bool:
        """Whether a tensor may be there and is not read: derived, of another task, or a head that is tied."""
        return bool(re.search(self.passed_over, theirs)) or (is_tied and theirs == self.of_model[_HEAD])


_LLAMA = Naming(
    of_model={"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", _HEAD: "lm_head.weight"},
    layers="model.layers",
    of_layer={
        "attention_norm": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "proj": ("self_attn.o_proj.weight",),
        "ffn_norm": ("post_attention_layernorm.weight",),
        "gate": ("mlp.gate_proj.weight",),
        "up": ("mlp.up_proj.weight",),
        "down": ("mlp.down_proj.weight",),
    },
    transposed=("proj", "down"),
    passed_over=r"rotary_emb\.inv_freq$",
)
_GPT = Naming(
    of_model={
        "embedding": "transformer.wte.weight",
        "position": "transformer.wpe.weight",
        "final_norm": "transformer.ln_f.weight",
        "final_norm_bias": "transformer.ln_f.bias",
        _HEAD: "lm_head.weight",
    },
    layers="transformer.h",
    of_layer={
        "attention_norm": ("ln_1.weight",),
        "attention_norm_bias": ("ln_1.bias",),
        "qkv": ("attn.c_attn.weight",),
        "qkv_bias": ("attn.c_attn.bias",),
        "proj": ("attn.c_proj.weight",),
        "proj_bias": ("attn.c_proj.bias",),
        "ffn_norm": ("ln_2.weight",),
        "ffn_norm_bias": ("ln_2.bias",),
        "up": ("mlp.c_fc.weight",),
        "up_bias": ("mlp.c_fc.bias",),
        "down": ("mlp.c_proj.weight",),
        "down_bias": ("mlp.c_proj.bias",),
    },
    transposed=("qkv", "up"),
    passed_over=r"\.attn\.(masked_)?bias$",  # causal masks
    renamed=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),  # the published files are of the model without its head
)
_BERT = Naming(
    of_model={
        "embedding": "bert.embeddings.word_embeddings.weight",
        "position": "bert.embeddings.position_embeddings.weight",
        "token_type": "bert.embeddings.token_type_embeddings.weight",
        "embedding_norm": "bert.embeddings.LayerNorm.weight",
        "embedding_norm_bias": "bert.embeddings.LayerNorm.bias",
        "transform": "cls.predictions.transform.dense.weight",
        "transform_bias": "cls.predictions.transform.dense.bias",
        "transform_norm": "cls.predictions.transform.LayerNorm.weight",
        "transform_norm_bias": "cls.predictions.transform.LayerNorm.bias",
        _HEAD: "cls.predictions.decoder.weight",
        "output_bias": "cls.predictions.bias",
    },
    layers="bert.encoder.layer",
    of_layer={
        "attention_norm": ("attention.output.LayerNorm.weight",),
        "attention_norm_bias": ("attention.output.LayerNorm.bias",),
        "qkv": ("attention.self.query.weight", "attention.self.key.weight", "attention.self.value.weight"),
        "qkv_bias": ("attention.self.query.bias", "attention.self.key.bias", "attention.self.value.bias"),
        "proj": ("attention.output.dense.weight",),
        "proj_bias": ("attention.output.dense.bias",),
        "ffn_norm": ("output.LayerNorm.weight",),
        "ffn_norm_bias": ("output.LayerNorm.bias",),
        "up": ("intermediate.dense.weight",),
        "up_bias": ("intermediate.dense.bias",),
        "down": ("output.dense.weight",),
        "down_bias": ("output.dense.bias",),
    },
    transposed=("proj", "down"),
    # The pooler and next-sentence prediction, indices, and a second name of the decoder's bias.
    passed_over=r"^bert\.pooler\.|^cls\.seq_relationship\.|position_ids$|^cls\.predictions\.(decoder\.)?bias$",
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)
# Where nothing is tied, transformers leaves `cls.predictions.bias` unused and adds the bias of the decoder itself.
_BERT_UNTIED = replace(_BERT, of_model={**_BERT.of_model, "output_bias": "cls.predictions.decoder.bias"})


def naming_of(spec: ModelSpec) -> Naming:
    """Hugging Face's names for the weights of ``spec``.

    Raises:
        InputError: transformers has no model of this family.
    """
    if spec.family == "bert":
        return _BERT if spec.tied_embeddings else _BERT_UNTIED
    if spec.family not in ("llama", "gpt"):
        raise InputError(
            f"model {spec.name}: transformers has no {spec.family}; only llama, gpt and bert are exchanged"
        )
    return _LLAMA if spec.family == "llama" else _GPT
