"""DeepSpeed-Ulysses (Jacobs et al. 2023) on sharded weights: UlyssesZ of ParaDySe.

As ``ulysses``; each operator's weights are gathered before it, forward and backward, and their gradients scattered
(ZeRO-3, Rajbhandari et al. 2020).
"""

from functools import partial

from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.head_exchange import ulysses_attention
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``ulysses_z`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.gathered(attention),
        whole_ffn=stage.gathered(ffn),
        tables=stage.view.tables,
        attend=partial(ulysses_attention, exchange=stage.view.exchange),
    )
