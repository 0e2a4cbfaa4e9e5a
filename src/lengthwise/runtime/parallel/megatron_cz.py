"""Ring context parallel (Liu et al. 2023) on sharded weights: MegatronCZ of ParaDySe.

As ``ring``; each operator's weights are gathered before it, forward and backward, and their gradients scattered
(ZeRO-3, Rajbhandari et al. 2020).
"""

from functools import partial

from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``megatron_cz`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.gathered(attention),
        whole_ffn=stage.gathered(ffn),
        tables=stage.view.tables,
        attend=partial(ring_attention, ring=stage.view.ring),
    )
