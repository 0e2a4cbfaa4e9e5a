"""Ring context parallel (Liu et al. 2023) with whole weights: for degrees beyond the number of heads.

Queries stay, keys and values go round: p - 1 hops forward, p backward. Everything else is local.
"""

from functools import partial

from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``ring`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.whole(attention),
        whole_ffn=stage.whole(ffn),
        tables=stage.view.tables,
        attend=partial(ring_attention, ring=stage.view.ring),
    )
