"""Sharded attention for transformers models, through its attention registry.

What a layer may see is said by the mask that the model asks transformers for, not by the arguments of its attention:
some models give their sliding window to the mask alone. A registered attention has masks of its own kind, so ours are
:class:`~lengthwise.runtime.wrap.position_masks.SymbolicMask`: no numbers, only what was asked for.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.position_masks import SymbolicMask, make_mask, sequence_mask
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard

NAME = "lengthwise"
_REFUSED = {
    "position_bias": "a bias by position",
    "head_mask": "a mask of heads",
    "indices": "a choice of keys",
    "block_indices": "a choice of keys",
    "cache": "a cache",
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
    """The attention function that transformers calls for every layer: queries [1, heads, t, H] to [1, t, heads, H].

    Raises:
        InputError: it asks for what is not known to be right on shards of packs.
    """
    name = type(module).__name__
    refused = [words for option, words in _REFUSED.items() if others.get(option) is not None]
    if attention_mask is not None and not isinstance(attention_mask, SymbolicMask):
        if not _hides_nothing(attention_mask):
            refused.append("a mask of its own")
        is_causal = False  # as transformers has it, where a mask is given
    sinks = others.get("s_aux") if others.get("sinks") is None else others["sinks"]
    if sinks is not None and sinks.shape != query.shape[1:2]:
        refused.append(f"attention sinks of shape {tuple(sinks.shape)}")
    if refused:
        raise InputError(
            f"{name} asks for {' and '.join(dict.fromkeys(refused))}, which cannot be honoured on packs; switch "
            "that off in its config, or have it computed sequence by sequence (packing='never')"
        )
    if len(query) != 1:
        raise InputError(f"{name} got a batch of {len(query)}; a pack is one row: give the forward micro_batch.inputs")
    shard = shards.current()
    mask = attention_mask if isinstance(attention_mask, SymbolicMask) else None
    causal, window = _seen(module, mask, is_causal, sliding_window)
    call = shard.counts.in_micro_batch(REGISTERED + shard.counts.registered)
    kind = AttentionRequest(
        causal=causal, scale=scaling, window=window, dropout=dropout, call=call,
        mask=None if mask is None or mask.function is None else sequence_mask(mask.function, shard),
        softcap=others.get("softcap"), sinks=sinks,
    )  # fmt: skip
    shard.counts.registered += 1
    with torch._C.DisableTorchFunction():
        q_tNH, k_tKH, v_tKH = (x[0].transpose(0, 1) for x in (query, key, value))
        out_tNH = attend_shard(q_tNH, k_tKH, v_tKH, kind, shard)
    return out_tNH[None], None


def _hides_nothing(mask: Tensor) -> bool:
    """Whether a mask hides none of this rank's keys from any query."""
    return mask.shape[-2] == 1 and bool((mask if mask.dtype == torch.bool else mask == 0).all())


REGISTERED = 1 << 20
"""Added to the numbers of these calls: a model may make calls of torch's attention as well."""


def _seen(
    module: nn.Module, mask: SymbolicMask | None, is_causal: bool | None, sliding_window: int | None
) -> tuple[bool, tuple[int, int] | None]:
    """Return whether attention is causal, and how many slots before and after its own each slot sees."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if mask is None:
        return causal, _window(sliding_window, causal=causal)
    if mask.function is not None:
        return False, None
    if mask.causal and not causal and sliding_window is None:
        return True, mask.window  # the mask says all that it needs
    asked = _window(sliding_window, causal=causal)
    if causal != mask.causal or (asked is not None and asked != mask.window):
        raise InputError(
            f"{type(module).__name__} attends {_told(causal, asked)}, but the model's mask is "
            f"{_told(mask.causal, mask.window)}; which of the two counts depends on its attn_implementation, so "
            "neither is taken. Make is_causal and sliding_window of its config agree with its layers"
        )
    return mask.causal, mask.window


def _told(causal: bool, window: tuple[int, int] | None) -> str:
    return ("causally" if causal else "both ways") + ("" if window is None else f" within {window} slots")


def _window(size: int | None, *, causal: bool) -> tuple[int, int] | None:
    """Slots before and after its own that each slot sees; ``size`` counts the slot itself, to either side."""
    if size is None:
        return None
    return (size - 1, 0) if causal else (size - 1, size - 1)


@cache
def _outside_of_graphs() -> Any:
    """The attention as a break in the graphs of compiled layers; always the same object, which graphs are made for."""
    return torch.compiler.disable(attention)


def register() -> None:
    """Register the attention and its masks with transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _outside_of_graphs())
    AttentionMaskInterface.register(NAME, make_mask)


class AttentionSwitch:
    """Switches a model to the sharded attention and back. Configs are copied, since other models may share them."""

    def __init__(self, model: nn.Module) -> None:
        """The model keeps its attention until :meth:`on`.

        Raises:
            InputError: it is no stack of self-attention, or one that long sequences compute in another way.
        """
        register()
        self._model: Any = model
        name = type(model).__name__
        if getattr(model.config, "attention_type", None) == "block_sparse":
            raise InputError(
                f"{name} attends to blocks of keys, drawn at random, where a sequence is long; set attention_type="
                "'original_full' in its config"
            )
        self._with = [module for module in model.modules() if hasattr(module, "config")]
        self._shared = [module.config for module in self._with]
        copies = copy.deepcopy(self._shared)  # in one go: what is one object stays one
        for module, config in zip(self._with, copies):
            module.config = config
        used = list({id(config): config for config in copies if hasattr(config, _CHOICE)}.values())
        of_models = {id(module.config) for module in self._with if hasattr(module, "set_attn_implementation")}
        self._copies = [config for config in used if id(config) not in of_models]  # of rotary embeddings, say
        self._configs = used + [sub_config for config in used for sub_config in _sub_configs(config)]
        self._before = [getattr(config, _CHOICE) for config in self._configs]

    def on(self) -> None:
        """Switch the sharded attention on, in the parts of the model that take it from the registry."""
        log = logging.getLogger("transformers.modeling_utils")
        before, log.disabled = log.disabled, True  # it warns of those others
        try:
            self._model.set_attn_implementation(NAME)
        finally:
            log.disabled = before
        for config in self._copies:
            setattr(config, _CHOICE, NAME)

    def off(self) -> None:
        """Restore the attention implementation that was configured, even if none was."""
        for config, before in zip(self._configs, self._before):
            setattr(config, _CHOICE, before)

    def turn_off_copies(self, memo: dict[int, Any]) -> None:
        """Restore the attention of a deep copy of the model; ``memo`` is that of the copy."""
        for config, before in zip(self._configs, self._before):
            setattr(copy.deepcopy(config, memo), _CHOICE, before)

    def release(self) -> None:
        """Give the model its original configs back."""
        self.off()
        for module, config in zip(self._with, self._shared):
            module.config = config


class OwnCaches:
    """The caches of keys and values that configs ask for: a layer that is computed again would add to them."""

    def __init__(self, *parts: nn.Module) -> None:
        """``parts``: models of transformers."""
        self._with: list[Any] = [module for part in parts for module in part.modules() if hasattr(module, "config")]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, configs ask for none."""
        configs = {id(module.config): module.config for module in self._with}
        nested = [part for config in configs.values() for part in _sub_configs(config)]
        asking = [config for config in (*configs.values(), *nested) if getattr(config, "use_cache", False)]
        before = [config.use_cache for config in asking]
        for config in asking:
            config.use_cache = False
        try:
            yield
        finally:
            for config, value in zip(asking, before):
                config.use_cache = value


_CHOICE = "_attn_implementation_internal"


def _sub_configs(config: Any) -> list[Any]:
    """The configs nested in a config, at any depth."""
    parts = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    present = [part for part in parts if part is not None]
    return present + [sub_config for part in present for sub_config in _sub_configs(part)]
