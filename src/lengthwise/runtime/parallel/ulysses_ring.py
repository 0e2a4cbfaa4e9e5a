"""Ulysses among neighbouring ranks and rings across them, with whole weights (USP, Fang & Zhao 2024).

For degrees beyond the number of heads, and for nodes: tokens are traded for heads within a node, keys and values go
round between nodes. Everything else is local.
"""

from functools import partial

from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``ulysses_ring`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.whole(attention),
        whole_ffn=stage.whole(ffn),
        tables=stage.view.tables,
        attend=partial(stage.view.attend, Method.ULYSSES_RING),
    )
