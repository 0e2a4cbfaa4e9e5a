"""Models of transformers: attention through its registry, arguments by its names.

A registered attention gets keys and values with their own number of heads, and no mask: whatever asks for another mask
than causal, bidirectional or a sliding window is refused here, for it would be ignored otherwise.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.adapt import shard as shards
from lengthwise.runtime.adapt.attention import Kind, attend_shard

NAME = "lengthwise"
_REFUSED = {
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "position_bias": "a bias by position",
    "head_mask": "a mask of heads",
}
"""Arguments of attentions that change what is computed, and what they ask for."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for every layer: queries [1, heads, t, H]; returns [1, t, heads, H].

    Raises:
        InputError: it asks for what is not known to be right on shards of packs.
    """
    refused = [words for name, words in _REFUSED.items() if others.get(name) is not None]
    if attention_mask is not None:
        refused.append("a mask of its own")
    if refused:
        raise InputError(f"{type(module).__name__} asks for {' and '.join(refused)}, which packs do not have")
    if len(query) != 1:
        raise InputError(f"{type(module).__name__} got a batch of {len(query)}; a pack is one row (micro_batch.inputs)")
    shard = shards.current()
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    kind = Kind(
        causal=causal,
        scale=scaling,
        window=_window(sliding_window, causal=causal),
        dropout=dropout,
        call=shard.counts.attention,
    )
    shard.counts.attention += 1
    with torch._C.DisableTorchFunction():
        out_tNH = attend_shard(*(x[0].transpose(0, 1) for x in (query, key, value)), kind, shard)
    return out_tNH[None], None


def _window(size: int | None, *, causal: bool) -> tuple[int, int] | None:
    """Slots before and after its own that each sees. A causal window counts the slot itself."""
    if size is None:
        return None
    return (size - 1, 0) if causal else (size, size)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Packs need none: attention is told where sequences end."""


def register() -> None:
    """Make the name known to transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


class Switch:
    """Turns a model's attention to ours and back. Its config becomes its own: others may share it."""

    def __init__(self, model: nn.Module) -> None:
        register()
        self._model: Any = model
        self._before = model.config._attn_implementation
        shared, own = model.config, copy.deepcopy(model.config)
        self._sharing = [module for module in model.modules() if getattr(module, "config", None) is shared]
        self._shared = shared
        for module in self._sharing:
            module.config = own

    def on(self) -> None:
        """Ours."""
        self._model.set_attn_implementation(NAME)

    def off(self) -> None:
        """As it was."""
        self._model.set_attn_implementation(self._before)

    def release(self) -> None:
        """The model with the config it came with."""
        self.off()
        for module in self._sharing:
            module.config = self._shared
