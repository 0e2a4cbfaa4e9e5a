"""FLOPs and workspaces of attention kernels over packs, from offsets that the host knew when it sent them.

N query heads, K key/value heads, H head size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

_VALUES = "_lengthwise_values"
FORWARDS = ("torch_attn::_varlen_attn", "aten::_flash_attention_forward")
BACKWARDS = ("torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward")
OF_EQUAL_LENGTHS = "aten::_scaled_dot_product_efficient_attention"
"""The kernel of float32, forward and, with a name that ends so, backward; [B, N, L, H]."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One launch of an attention kernel."""

    flops: int
    """Two products forward and four backward over the pairs that see each other, as costs count them."""
    workspace_bytes: int
    """Allocated and freed by the kernel itself: FlashAttention-2's backward sums the gradient of queries in float32,
    and makes one of keys and values for every query head."""


def remember(on_device: Tensor, values: np.ndarray) -> None:
    """Keep the values of what the host sends to the device."""
    setattr(on_device, _VALUES, values)


def values_of(tensor: Tensor) -> np.ndarray | None:
    """The values of a tensor of the device, if the host knows them."""
    values: np.ndarray | None = getattr(tensor, _VALUES, None)
    return values


def carry(source: Tensor, target: Tensor, *, copies: int = 1) -> Tensor:
    """``target``, with the values that ``source`` is known to have, so many times."""
    if (values := values_of(source)) is not None:
        remember(target, np.tile(values, copies) if copies > 1 else values)
    return target


def read(func: Any, args: Any, kwargs: Any) -> AttentionKernel | None:
    """The launch, if ``func`` is an attention kernel."""
    name = func._schema.name
    if name not in FORWARDS + BACKWARDS and not name.startswith(OF_EQUAL_LENGTHS):
        return None
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args)), **kwargs}
    query, key = arguments["query"], arguments["key"]
    if name.startswith(OF_EQUAL_LENGTHS):
        num_sequences, num_heads, length, head_size = query.shape
        pairs = _pairs(*[np.full(num_sequences, length)] * 2, before=-1, after=0 if arguments.get("is_causal") else -1)
        flops = (8 if name.endswith("_backward") else 4) * num_heads * head_size * pairs
        return AttentionKernel(flops=flops, workspace_bytes=0)
    offsets_q, offsets_k = (arguments.get(f"cu_seq_{x}", arguments.get(f"cum_seq_{x}")) for x in "qk")
    window = arguments.get("window_size") or (arguments.get("window_size_left"), arguments.get("window_size_right"))
    before, after = (-1 if size is None else int(size) for size in window)
    after = 0 if arguments.get("is_causal") else after
    pairs = _pairs(_lengths(query, offsets_q), _lengths(key, offsets_k), before=before, after=after)
    num_heads, head_size = query.shape[-2:]
    if name in FORWARDS:
        return AttentionKernel(flops=4 * num_heads * head_size * pairs, workspace_bytes=0)
    rows_q, rows_k = (x.numel() // (x.shape[-1] * x.shape[-2]) for x in (query, key))
    padded = -(-head_size // 32) * 32
    workspace = 4 * num_heads * rows_q * (padded + 1)
    if key.shape[-2] != num_heads:
        workspace += 2 * rows_k * num_heads * head_size * key.element_size()
    return AttentionKernel(flops=8 * num_heads * head_size * pairs, workspace_bytes=workspace)


def _lengths(x: Tensor, offsets: Tensor | None) -> np.ndarray:
    """Rows of each sequence: by offsets, or of a batch of equal ones."""
    if offsets is None:
        return np.full(x.shape[0], x.shape[1])
    values = getattr(offsets, _VALUES, None)
    assert values is not None, "offsets of a pack come from the host"
    return np.diff(values.astype(np.int64))


def _pairs(queries: np.ndarray, keys: np.ndarray, *, before: int, after: int) -> int:
    """Pairs of a query and a key that it sees: at most so many ``before`` and ``after`` its own place, -1: all.

    The last query's own place is the last key.
    """
    pairs = queries * keys if after < 0 else _keys_up_to(after, queries, keys)
    return int((pairs if before < 0 else pairs - _keys_up_to(-before - 1, queries, keys)).sum())


def _keys_up_to(distance: int, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Pairs of each sequence whose key is at most ``distance`` after the query's own place."""

    def pairs_of(most: np.ndarray) -> np.ndarray:  # of queries that see up to 1, 2, ... and ``most`` keys
        below = np.clip(most, 0, keys)
        pairs: np.ndarray = below * (below + 1) // 2 + np.maximum(most - keys, 0) * keys
        return pairs

    return pairs_of(keys + distance) - pairs_of(keys - queries + distance)
