"""Which prepared models compute micro-batches in slices of their tokens, one after another."""

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.layer_profile import AttentionSizes
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.exchange_script import AttentionExchange, ExchangeScript


def slice_problem(prepared: PreparedModel, *, is_coupled: bool = False) -> str:
    """Why micro-batches of the model cannot be cut into slices; an empty string if they can, as far as it is known
    before slices are compared with whole micro-batches.

    ``is_coupled``: whether the run's loss couples sequences of different micro-batches.
    """
    model, collator = prepared.wrapped_model, prepared.collator
    calls = model.script.calls.values()
    problems = {
        "it is computed sequence by sequence": model.by_sequence is not None,
        "it does not predict next tokens, so that tokens may see later ones": model.objective != NEXT_TOKEN,
        "its slots are not tokens": collator.slot_tokens > 1,
        "its items are units, whose losses are of whole sequences": collator.units is not None,
        "coupled_loss= couples its micro-batches": is_coupled,
        "frozen models compute beside it": bool(prepared.frozen_models),
        "compiled layers compute all tokens at once": model.compiled is not None,
        "its attention has masks of its own": bool(model.masks),
        "its ranks exchange tokens otherwise than in the attention of its layers": any(
            not isinstance(call, AttentionExchange) or call.layer is None for call in calls
        ),
        "FSDP2 shards the model": isinstance(prepared.state, Fsdp2State),
    }
    return next((problem for problem, applies in problems.items() if applies), "")


def attention_sizes(script: ExchangeScript) -> AttentionSizes | None:
    """What a layer attends with; None: no attention was observed."""
    by_layer: dict[int | None, list[AttentionExchange]] = {}
    for call in script.calls.values():
        if isinstance(call, AttentionExchange):
            by_layer.setdefault(call.layer, []).append(call)
    sizes = [
        AttentionSizes(
            num_heads=sum(call.num_heads for call in calls),
            num_kv_heads=sum(call.num_kv_heads for call in calls),
            head_size=max(call.head_size for call in calls),
        )
        for calls in by_layer.values()
    ]
    return max(sizes, key=lambda size: size.num_kv_heads * size.head_size, default=None)
