"""The operators of each parallel method.

Of the sequence-parallel ones ranks compute their own tokens, and only attention communicates. Weights are whole, or
sharded: then each operator's are gathered before it, forward and backward, and their gradients scattered (ZeRO-3,
Rajbhandari et al. 2020), as ParaDySe has it.
"""

from collections.abc import Callable
from functools import partial

from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, WEIGHTS_OF, Method, WeightPlacement
from lengthwise.runtime.models.execution import SliceAttention
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.operators import AttentionWeights, Dense, FfnWeights, Operators
from lengthwise.runtime.parallel.head_exchange import ulysses_attention
from lengthwise.runtime.parallel.megatron_ts import megatron_ts
from lengthwise.runtime.parallel.metp import Metp
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.stage_shard import LayerStage, StageView
from lengthwise.runtime.parallel.token_local import CrossTokenAttention, TokenLocal

MakeOperators = Callable[[LayerStage, AttentionWeights, FfnWeights], Operators]
"""Makes the operators of one layer for one micro-batch."""


def make_operators(method: Method) -> MakeOperators:
    """What makes the operators of ``method``; it raises ``InputError`` where ranks cannot share a layer like that."""
    return _OPERATORS.get(method) or partial(_sequence_parallel, method)


def _sequence_parallel(method: Method, stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    in_slice = stage.slice_attention
    wrap = stage.whole if WEIGHTS_OF[method] is WeightPlacement.WHOLE else stage.gathered
    return TokenLocal(
        whole_attention=wrap(attention),
        whole_ffn=wrap(ffn),
        tables=stage.view.tables,
        tiles=stage.tiles,
        grouped=stage.in_head_groups(attention) if method in HEAD_GROUP_METHODS else None,
        kept_attention=stage.kept_attention,
        attend=_ATTENTION[method](stage.view, stage.kept_attention) if in_slice is None else _in_slice(stage, in_slice),
    )


def _dense(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """One device; with groups of heads as Ulysses among one rank."""
    if stage.head_groups > 1:
        return _sequence_parallel(Method.ULYSSES, stage, attention, ffn)
    view, tables = stage.view.view, stage.view.tables
    return Dense(view, tables, stage.tiles, stage.products, stage.kept_attention, stage.slice_attention)


def _in_ring(view: StageView, kept_attention: KeptAttention | None) -> CrossTokenAttention:
    """Ring context parallel (Liu et al. 2023): queries stay, keys and values go round, p - 1 hops, back p."""
    return partial(ring_attention, ring=view.ring, kept_attention=kept_attention)


def _in_two_rounds(view: StageView, kept_attention: KeptAttention | None) -> CrossTokenAttention:
    """Ring self-attention (Li et al. 2023): keys go round once for the sums of the softmax, then values for outputs.

    Theirs keeps the scores [N, t, T] in between, what made it run out of memory; ours sends the keys again with the
    values. ParaDySe names this method, its code never had it.
    """
    return partial(ring_attention, ring=view.ring, two_rounds=True, kept_attention=kept_attention)


def _by_heads(view: StageView, kept_attention: KeptAttention | None) -> CrossTokenAttention:
    """DeepSpeed-Ulysses (Jacobs et al. 2023): all-to-alls trade tokens for heads and back, two in each direction."""
    return partial(ulysses_attention, exchange=view.exchange, kept_attention=kept_attention)


def _in_slice(stage: LayerStage, in_slice: SliceAttention) -> CrossTokenAttention:
    """Ulysses around the attention of a slice, whose earlier keys and values each rank has for its heads."""
    return partial(ulysses_attention, exchange=stage.view.exchange, core=lambda q, k, v, first_head: in_slice(q, k, v))


def _on_grid(view: StageView, kept_attention: KeptAttention | None) -> CrossTokenAttention:
    """Ulysses within a node, keys and values round between nodes (USP, Fang & Zhao 2024): for degrees beyond heads."""
    return partial(view.attend, Method.ULYSSES_RING, kept_attention=kept_attention)


def _gathered(view: StageView, kept_attention: KeptAttention | None) -> CrossTokenAttention:
    """Keys and values of all tokens at once, and again in the backward (Llama 3, Grattafiori et al. 2024)."""
    return partial(view.attend, Method.ALL_GATHER, kept_attention=kept_attention)


_ATTENTION: dict[Method, Callable[[StageView, KeptAttention | None], CrossTokenAttention]] = {
    Method.MEGATRON_CZ: _in_ring,
    Method.RING: _in_ring,
    Method.COLOSSAL_Z: _in_two_rounds,
    Method.ULYSSES_Z: _by_heads,
    Method.ULYSSES: _by_heads,
    Method.ULYSSES_RING: _on_grid,
    Method.ALL_GATHER: _gathered,
}
_OPERATORS: dict[Method, MakeOperators] = {
    Method.DENSE: _dense,
    Method.MEGATRON_TS: lambda stage, attention, ffn: megatron_ts(stage),
    Method.METP: lambda stage, attention, ffn: Metp(stage),
}
