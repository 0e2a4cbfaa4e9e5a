"""What groups of heads change in a layer of closed forms: what attention keeps and has at once, and what is done again.

The forward keeps the layer's normed input, the outputs of attention and their log-sum-exps; queries, keys and values
are there for one group. The backward projects them again and trades them, with the outputs, for heads once more; every
trade is made group by group. T tokens of the pack, p devices, D hidden size, N heads and K key/value heads of H.
"""

from dataclasses import dataclass, replace

from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, Method, PipelineConfig
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.heads import split_heads
from lengthwise.cost.analytic.volume import LayerVolume
from lengthwise.cost.memory_model import DTYPE_BYTES


def has_groups(scheme: PipelineConfig, method: Method) -> bool:
    """Whether layers under ``method`` attend with some of the heads at a time under ``scheme``."""
    return scheme.head_groups > 1 and method in HEAD_GROUP_METHODS


def head_group_counts(model: ModelSpec, degree: int) -> tuple[int, ...]:
    """Into how many groups plans may cut the heads of each of ``degree`` ranks: by key/value heads, or one by one.

    None where a rank has one head.
    """
    heads = split_heads(model.num_heads, model.num_kv_heads, degree=degree)
    return tuple(sorted({heads.num_kv_heads, heads.num_heads} - {1}))


@dataclass(frozen=True, kw_only=True)
class GroupedHeads:
    """A layer under ``dense``, ``ulysses`` or ``ulysses_z`` that attends in groups of heads."""

    volume: LayerVolume
    """Its ``live_bytes`` are those of a group."""
    heads_at_once: float
    """The share of its heads that a device attends with at once."""
    sum_bytes: float
    """Per token of the pack: keys, values and float32 sums of gradients beside a group's backward."""
    key_gradient_bytes: float
    """Per token of the pack: the gradients of keys and values that the kernel gives, a copy for each query head where
    several in a group read one."""


def grouped_heads(volume: LayerVolume, model: ModelSpec, *, degree: int, dtype: str, groups: int) -> GroupedHeads:
    """What ``volume``, of all heads at once, becomes in so many groups."""
    width, size = DTYPE_BYTES[dtype], model.head_size
    master = max(4, width)
    heads = split_heads(model.num_heads, model.num_kv_heads, degree=degree)
    num_queries, num_keys = -(-heads.num_heads // groups), -(-heads.num_kv_heads // groups)
    queries_at_once, keys_at_once = num_queries / heads.num_heads, num_keys / heads.num_kv_heads
    copies = 2 * heads.num_kv_copies * size / degree
    queries, keys = model.num_heads * size / degree, 2 * heads.num_kv_heads * size
    again = 2.0 * model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * size / degree
    forward, backward = volume.forward, volume.backward
    sent = replace(forward.tokens, calls=groups * forward.tokens.calls)
    sent_back = replace(
        backward.tokens,
        all_to_all=backward.tokens.all_to_all + forward.tokens.all_to_all,
        calls=groups * backward.tokens.calls,
    )
    head_outputs = heads.num_heads * size if degree > 1 else 0.0  # kept in the split of heads no more
    in_groups = replace(
        volume,
        forward=replace(forward, tokens=sent),
        backward=replace(backward, matmul_flops=backward.matmul_flops + again, tokens=sent_back),
        kept_bytes=volume.kept_bytes - (heads.num_heads * size + keys + head_outputs) * width,
        live_bytes=(degree > 1) * (queries * queries_at_once + copies * keys_at_once) * width,
    )
    return GroupedHeads(
        volume=in_groups,
        heads_at_once=queries_at_once,
        sum_bytes=model.hidden_size * master / degree + keys * keys_at_once * (width + master),
        key_gradient_bytes=2 * (num_keys + (num_queries > num_keys) * num_queries) * size * width,
    )
