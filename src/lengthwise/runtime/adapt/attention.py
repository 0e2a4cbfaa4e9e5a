"""Attention of somebody else's layer on a shard: tokens for heads and back, whole sequences between.

t slots of this rank, T of the pack, N query heads, K key/value heads, H head size. A model whose slots are frames has
rows of heads: each of its R places in a frame attends across frames by itself, with heads of its own; N is R times the
model's heads then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import InputError
from lengthwise.runtime.adapt.noise import attention_keep
from lengthwise.runtime.adapt.shard import Attended, Shard
from lengthwise.runtime.model.attention import attend
from lengthwise.runtime.parallel.exchange import exchange_attention

QUERY_CHUNK = 512
"""Queries that a masked attention computes at once: its logits are never all in memory."""

DRAWN_AT_ONCE = 1 << 25
"""Weights of attention that dropout draws for at once."""


Keep = Callable[[int, range, range], Tensor]
"""[heads, queries, keys] booleans: which weights of attention dropout leaves."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a call of attention asks for."""

    causal: bool
    scale: float | None = None
    """Of the logits; None: 1 / sqrt(H)."""
    window: tuple[int, int] | None = None
    """How many slots before and after its own each slot sees; None: all of its sequence."""
    dropout: float = 0.0
    call: int = 0
    """Number of the call in the forward; part of what draws its dropout."""


def attend_shard(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, kind: Kind, shard: Shard) -> Tensor:
    """Attention of this rank's slots over their whole sequences: ``[t, N, H]``, H that of the values.

    Raises:
        InputError: keys are not those of the same slots.
    """
    if k_tKH.shape[:2] != v_tKH.shape[:2] or q_tNH.shape[0] != k_tKH.shape[0] or q_tNH.shape[2] != k_tKH.shape[2]:
        raise InputError(
            f"attention of queries {tuple(q_tNH.shape)} over keys {tuple(k_tKH.shape)} and values "
            f"{tuple(v_tKH.shape)}: only self-attention, of each slot over its own sequence, can be prepared"
        )
    size, value_size = q_tNH.shape[2], v_tKH.shape[2]
    width = max(size, value_size)  # zeros make both as wide: they change no product
    factor = (size**-0.5 if kind.scale is None else kind.scale) * width**0.5
    if abs(factor - 1.0) > 1e-12:
        q_tNH = q_tNH * factor
    q_tNH, k_tKH = (F.pad(x, (0, width - size)) if width > size else x for x in (q_tNH, k_tKH))
    v_tKH = F.pad(v_tKH, (0, width - value_size)) if width > value_size else v_tKH
    shard.attended.append(
        Attended(
            num_heads=q_tNH.shape[1], num_kv_heads=k_tKH.shape[1], head_size=width, dtype=q_tNH.dtype, layer=shard.layer
        )
    )
    if shard.group.size == 1:
        out_tNH = _attend_whole(q_tNH, k_tKH, v_tKH, 0, kind=kind, shard=shard)
    else:
        core = partial(_attend_whole, kind=kind, shard=shard)
        out_tNH = exchange_attention(q_tNH, k_tKH, v_tKH, shard.stage.exchange, core=core)
    return out_tNH[..., :value_size]


def _attend_whole(q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor, first_head: int, *, kind: Kind, shard: Shard) -> Tensor:
    cu_seqlens = shard.cu_seqlens
    window = kind.window
    if window is not None and min(window[: 1 if kind.causal else 2]) + 1 >= shard.longest:
        window = None  # wider than any sequence
    if window is None and not kind.dropout:
        return attend(q_TnH, k_TkH, v_TkH, cu_seqlens, causal=kind.causal)
    group_size = q_TnH.shape[1] // k_TkH.shape[1]
    k_TnH, v_TnH = (x if group_size == 1 else x.repeat_interleave(group_size, dim=1) for x in (k_TkH, v_TkH))
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    outs = []
    for number, (q, k, v) in enumerate(zip(*(x.split(lengths) for x in (q_TnH, k_TnH, v_TnH)))):
        keep = None
        if kind.dropout:
            sequence = shard.ids[number] if number < len(shard.ids) else -1
            keep = partial(attention_keep, shard, sequence, kind.call, first_head, kind.dropout)
        outs.append(_attend_masked(q, k, v, kind, window, keep))
    return torch.cat(outs)


def _attend_masked(
    q_LnH: Tensor, k_LnH: Tensor, v_LnH: Tensor, kind: Kind, window: tuple[int, int] | None, keep: Keep | None
) -> Tensor:
    """One sequence, some queries at a time, with all that they may see."""
    length = len(q_LnH)
    before, after = window or (length, length)
    after = 0 if kind.causal else after
    chunk, num_heads = QUERY_CHUNK, q_LnH.shape[1]
    if keep is not None:
        chunk = min(chunk, max(1, DRAWN_AT_ONCE // (num_heads * length)))
    outs = []
    for start in range(0, length, chunk):
        queries = range(start, min(length, start + chunk))
        keys = range(max(0, start - before), min(length, queries.stop + after))
        qkv = (x[r.start : r.stop].transpose(0, 1) for x, r in ((q_LnH, queries), (k_LnH, keys), (v_LnH, keys)))
        distance = torch.arange(queries.start, queries.stop, device=q_LnH.device)[:, None] - torch.arange(
            keys.start, keys.stop, device=q_LnH.device
        )
        sees = (distance <= before) & (distance >= -after)
        if keep is None:
            q, k, v = qkv
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=sees)[0]
        else:
            attend_some = partial(
                _attend_dropping, sees=sees, keep=partial(keep, num_heads, queries, keys), p=kind.dropout
            )
            # What drops is drawn again in the backward: kept, its weights would take memory of length squared.
            out = checkpoint(attend_some, *qkv, use_reentrant=False, preserve_rng_state=False)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def _attend_dropping(q: Tensor, k: Tensor, v: Tensor, *, sees: Tensor, keep: Callable[[], Tensor], p: float) -> Tensor:
    """[n, queries, H] of queries, keys and values [n, ..., H]."""
    logits = (q @ k.transpose(1, 2)) * q.shape[2] ** -0.5
    weights = logits.masked_fill(~sees, -torch.inf).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (weights * keep() * (1.0 / (1.0 - p) if p < 1.0 else 0.0)).to(v.dtype) @ v
