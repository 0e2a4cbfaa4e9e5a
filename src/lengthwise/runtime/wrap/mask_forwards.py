"""Learn the attention masks of a model from forwards of whole sequences, without attention."""

from collections.abc import Callable
from typing import Any

import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.attention_calls import AllAttendedError
from lengthwise.runtime.wrap.call_rules import CallRules, ForwardCalls
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.custom_masks import MaskTables
from lengthwise.runtime.wrap.layer_hooks import HookedLayers, intercepting
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls


def note_masks(masks: MaskTables, rules: CallRules, seen: list[ForwardCalls], *, model: str) -> None:
    """Record the masks of traced forwards of one sequence each; ``model``: its name, for messages.

    Raises:
        InputError: a mask is no function of positions, or an attention cannot be sharded.
    """
    for number, rule in enumerate(rules.attention):
        if rule.note.startswith("refused") and rule.is_over_slots:
            raise InputError(f"attention call {number} of {model} is {rule.note}")
        for call in (calls.attention[number] for calls in seen):
            if call.mask is not None and rule.is_over_slots:
                masks.note(number, call.mask, call.shape)
                if call.operations is not None:
                    masks.note_operations(number, call.operations, call.scale)


def learn_masks(
    masks: MaskTables,
    shard: PackShard,
    layers: HookedLayers,
    new_intercept: Callable[[ForwardCalls], InterceptCalls],
    inputs_of: Callable[[MicroBatch], dict[str, Any]],
    forward: Callable[..., Any],
) -> None:
    """Record masks for the lengths of a micro-batch, by computing some of its sequences alone.

    ``new_intercept``: meets calls of a forward, and notes them; ``forward``: takes what ``inputs_of`` makes of a
    micro-batch.
    """
    make_alone = shard.alone
    for number, length in sorted(enumerate(shard.lengths), key=lambda numbered: -numbered[1]):
        if make_alone is None or masks.is_known(length):
            continue
        micro_batch: MicroBatch = make_alone(number)
        calls = ForwardCalls()
        intercept = new_intercept(calls)
        intercept.shard, before = micro_batch.shard, layers.intercept
        layers.intercept = intercept
        devices = [shard.device] if shard.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), active(micro_batch.shard):
                inputs = inputs_of(micro_batch)
                with intercepting(intercept):
                    forward(**inputs)
        except AllAttendedError:
            pass
        finally:
            layers.intercept = before
            calls.attention.clear()  # cycles keep the calls for a while, and their masks are large
