"""Models that cannot be prepared as they are: each is refused by one sentence with the way out."""

from typing import Any

import torch
from torch import nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.adapt.forwards import PreparedForward

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
_LOOKS = ("pixel_values", "input_values", "input_features")
"""Names of inputs of models that look at pictures or listen."""


def check_model(model: Any, *, makes_inputs: bool = False) -> None:
    """Raise ``InputError`` if a model is no module, is wrapped, compiled, not there yet, or prepared already."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the first argument is the model, an nn.Module; {name} is none"
            + (": load it with from_pretrained" if isinstance(model, str) else "")
        )
    _check_not_prepared(model)
    _check_not_wrapped(model)
    meta = next((key for key, value in _tensors(model) if value.is_meta), None)
    if meta is not None:
        raise InputError(
            f"{meta} of {name} is on the meta device, so it has no values; load its weights, or make it with "
            "model.to_empty(device=...) and initialise it"
        )
    _check_adapters(model)
    config = getattr(model, "config", None)
    looks_at = getattr(model, "main_input_name", "input_ids") if config is not None else "input_ids"
    if looks_at in _LOOKS and not makes_inputs:
        raise InputError(
            f"{name} takes {looks_at}, and items are rows of token ids; say what a micro-batch of it is: "
            "slot_tokens=..., inputs=lambda micro_batch: {...} and loss="
        )


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _check_not_prepared(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if isinstance(vars(module).get("forward"), PreparedForward):
            part = f"its part {key}" if key else "it"
            raise InputError(
                f"{type(model).__name__} cannot be prepared: {part} was prepared before and belongs to another run; "
                "call run.close() first, which gives it back with today's weights"
            )


def _check_not_wrapped(model: nn.Module) -> None:
    name = type(model).__name__
    if any(kind.__name__ in _WRAPPERS for kind in type(model).__mro__):
        raise InputError(f"{name} sums gradients or shards weights by itself, which the run does: give {name}.module")
    for key, module in model.named_modules():
        compiled = type(module).__name__ == "OptimizedModule"
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            part = f"{key} of {name}" if key else name
            way_out = "give model._orig_mod" if compiled and not key else "leave compile() out"
            raise InputError(f"{part} is compiled, and attention in compiled code cannot be shared by ranks: {way_out}")


def _check_adapters(model: Any) -> None:
    """Adapters of peft that put slots of their own before a sequence's change where every token lies."""
    for key, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise InputError(
                f"adapter {key!r} is {kind}, which puts {getattr(config, 'num_virtual_tokens', 'some')} virtual tokens "
                "before each sequence, and packs have no place for them; use LoRA, DoRA, IA3 or another adapter of "
                "weights"
            )
