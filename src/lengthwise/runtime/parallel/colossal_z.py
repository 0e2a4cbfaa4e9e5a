"""Ring self-attention (Li et al. 2023) on sharded weights: ColossalZ of ParaDySe, which its code never had.

Keys go round once for the sums of the softmax, then values for the outputs. Theirs keeps the scores [N, t, T] in
between, what made it run out of memory; ours sends the keys again with the values. Weights as in ``megatron_cz``.
"""

from functools import partial

from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``colossal_z`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.gathered(attention),
        whole_ffn=stage.gathered(ffn),
        tables=stage.view.tables,
        attend=partial(ring_attention, ring=stage.view.ring, two_rounds=True),
    )
