"""Fields of a ``config.json`` by what they say, whatever a family calls them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.models.hf_values import MAX_SIZE

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where models of several parts keep the fields of their language model."""
NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner", "dff"),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts",
    ),
    "expert_size": ("moe_intermediate_size",),
    "shared_size": (
        "shared_expert_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "num_shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense_size": ("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "moe_every": ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
    "window": ("sliding_window",),
    "window_pattern": ("sliding_window_pattern",),
    "full_before": ("max_window_layers",),
    "embedding_size": ("embedding_size", "input_embedding_size", "word_embed_proj_dim", "embedding_dim"),
}  # fmt: skip
"""What is read, and what families call it."""


@dataclass(frozen=True)
class PricedFields:
    """The fields of a configuration, by any name that a family gives them."""

    values: Mapping[str, Any]
    path: Path

    def size(self, what: str) -> int | None:
        """The whole number that says ``what``, or None.

        Raises:
            InputError: it is something else.
        """
        for name in NAMES[what]:
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
            names = " or ".join(NAMES[what])
            raise InputError(f"{self.path} lacks {names}" if value is None else f"{self.path}: {names} is 0")
        return value

    def names(self, field: str) -> list[Any]:
        """The list in ``field``; empty where there is none."""
        value = self.values.get(field) or []
        if not isinstance(value, list):
            raise InputError(f"{self.path}: {field} must be a list, not {brief(value)}")
        return value
