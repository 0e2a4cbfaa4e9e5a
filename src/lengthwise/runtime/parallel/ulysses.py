"""DeepSpeed-Ulysses (Jacobs et al. 2023) with whole weights, the method of data-centric parallel (DCP).

Around attention tokens are traded for heads and back: two all-to-alls forward, two backward. Everything else is local.
"""

from functools import partial

from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.head_exchange import ulysses_attention
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``ulysses`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.whole(attention),
        whole_ffn=stage.whole(ffn),
        tables=stage.view.tables,
        attend=partial(ulysses_attention, exchange=stage.view.exchange),
    )
