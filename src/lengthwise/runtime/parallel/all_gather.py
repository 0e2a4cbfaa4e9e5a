"""Context parallel by an all-gather of keys and values (Llama 3, Grattafiori et al. 2024), with whole weights.

Queries stay; the keys and values of all tokens come at once, and come again in the backward. Everything else is local.
"""

from functools import partial

from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators
from lengthwise.runtime.parallel.stage_shard import LayerStage
from lengthwise.runtime.parallel.token_local import TokenLocal


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the ``all_gather`` operators of one layer for one micro-batch."""
    return TokenLocal(
        whole_attention=stage.whole(attention),
        whole_ffn=stage.whole(ffn),
        tables=stage.view.tables,
        attend=partial(stage.view.attend, Method.ALL_GATHER),
    )
