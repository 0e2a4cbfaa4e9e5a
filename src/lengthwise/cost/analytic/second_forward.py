"""What a recomputed layer keeps of its attention, and its second forward without it (selective recompute).

T tokens of the pack, p devices, N query heads of size H. Kept are the output of attention, N H numbers per token where
all heads are attended with, and a float32 log-sum-exp per head, in the split in which attention has them.
"""

from dataclasses import replace

from lengthwise.core.head_split import ulysses_degree
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.heads import split_heads
from lengthwise.cost.analytic.volume import LayerPass
from lengthwise.cost.links import SENT_NOTHING

BY_HEADS = frozenset({Method.DENSE, Method.ULYSSES, Method.ULYSSES_Z, Method.MEGATRON_TS})
"""Methods under which a rank attends over all tokens with some of the heads."""


def attention_bytes(model: ModelSpec, method: Method, *, degree: int, width: int) -> float:
    """Bytes per token of the pack that the attention of a recomputed layer keeps on the busiest rank."""
    among = degree if method in BY_HEADS else 1
    if method is Method.ULYSSES_RING:
        among = ulysses_degree(method, degree, model.num_heads, model.num_kv_heads)
    heads = split_heads(model.num_heads, model.num_kv_heads, degree=among).num_heads
    return heads * (model.head_size * width + 4) * among / degree


def forward_without_attention(forward: LayerPass, method: Method) -> LayerPass:
    """The second forward of a layer whose attention is kept: keys and values that ranks would be sent for it alone
    stay.
    """
    tokens = forward.tokens
    if method is Method.ULYSSES_RING:
        tokens = replace(tokens, ring=0.0, calls=2 if tokens.all_to_all else 0)
    elif method not in BY_HEADS:
        tokens = SENT_NOTHING
    return replace(forward, attention_flops=0.0, tokens=tokens)
