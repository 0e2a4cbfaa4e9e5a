"""Adapters of peft that cannot be trained as they are: each is refused by name with the way out."""

from typing import Any

from lengthwise.core.errors import InputError


def check_adapters(model: Any, *, packing: str) -> None:
    """Raise ``InputError`` if an adapter of a model puts slots before a sequence, looks at gradients after a step, or
    computes what packs or ranks change; ``packing``: the option of ``prepare``.
    """
    for key, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if problem := _problem_of(kind, config) or _problem_in_packs(config, packing):
            raise InputError(f"adapter {key!r} {problem}")


def _problem_of(kind: str, config: Any) -> str:
    """What is wrong with an adapter however it is computed; an empty string: nothing."""
    if kind == "ADALORA":
        return (
            f"is {kind}, which chooses its ranks by gradients after each step, and gradients are sharded over ranks; "
            "use LoRA or DoRA"
        )
    if kind == "SHIRA":
        return (
            f"is {kind}, which computes with sparse tensors, and those can neither be saved in host memory nor sharded "
            "over ranks; use LoRA or DoRA"
        )
    if getattr(config, "is_prompt_learning", False):
        return (
            f"is {kind}, which puts {getattr(config, 'num_virtual_tokens', 'some')} virtual tokens before each "
            "sequence, and packs have no place for them; use LoRA, DoRA, IA3 or another adapter of weights"
        )
    if names := getattr(config, "target_parameters", None):
        listed = ", ".join(map(repr, [names] if isinstance(names, str) else names))
        return (
            f"has target_parameters={listed}: peft puts the sum of a weight and its adapter into the model at every "
            "forward, where the run shards the weight; name modules in target_modules instead, or train these weights "
            "whole, by requires_grad_(True) without an adapter"
        )
    return ""


def _problem_in_packs(config: Any, packing: str) -> str:
    """What is wrong with an adapter in packs of sequences; an empty string: nothing."""
    if packing != "never" and (tokens := getattr(config, "alora_invocation_tokens", None)):
        return (
            f"is an activated LoRA (alora_invocation_tokens={list(tokens)}), which begins where these tokens are last "
            "in a row, and a pack is one row of several sequences; set packing='never' and recompute='none', by which "
            "it is computed exactly, sequence by sequence"
        )
    return ""
