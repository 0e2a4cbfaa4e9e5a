"""Attention of somebody else's layer on a shard: tokens for heads and back, whole sequences between.

t slots of this rank, T of the pack, N query heads, K key/value heads, H head size. A model whose slots are frames has
rows of heads: each of its R places in a frame attends across frames by itself, with heads of its own; N is R times the
model's heads then.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.varlen_attention import attend
from lengthwise.runtime.parallel.head_exchange import ulysses_attention
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.counter_rng import attention_keep
from lengthwise.runtime.wrap.exchange_script import AttentionExchange

QUERY_CHUNK = 512
"""Queries that a masked attention computes at once: its logits are never all in memory."""

DRAWN_AT_ONCE = 1 << 25
"""Weights of attention that dropout draws for at once."""


Keep = Callable[[int, range, range], Tensor]
"""[heads, queries, keys] booleans: which weights of attention dropout leaves."""

SequenceMask = Callable[[int, range, range, range], Tensor]
"""From the number of a sequence in the pack, heads, and queries and keys by their positions in that sequence to
[queries, keys] or [heads, queries, keys]: booleans, true where a query sees a key, or what is added to the logits."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """The options of an attention call: mask, window, scale, dropout, softcap, sinks."""

    causal: bool
    scale: float | None = None
    """The scale of the logits; None: 1 / sqrt(H)."""
    window: tuple[int, int] | None = None
    """How many slots before and after its own each slot sees; None: all of its sequence."""
    dropout: float = 0.0
    call: int = 0
    """Number of the call in the forward; part of what draws its dropout."""
    mask: SequenceMask | None = None
    """Says alone what each slot sees, where that is neither causal nor open nor a window."""
    softcap: float | None = None
    """Logits x become ``softcap * tanh(x / softcap)`` before they are masked."""
    sinks: Tensor | None = None
    """[N] a further logit of every query, one per head, whose weight takes no value."""

    @property
    def is_plain(self) -> bool:
        """Whether this is softmax attention, causal or open, that kernels compute."""
        special = (self.mask, self.softcap, self.sinks)
        return all(option is None for option in special) and not self.dropout


def attend_shard(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, kind: AttentionRequest, shard: PackShard) -> Tensor:
    """Attend from this rank's slots over their whole sequences: ``[t, N, H]``, with the values' H.

    Raises:
        InputError: keys are not those of the same slots.
    """
    if k_tKH.shape[:2] != v_tKH.shape[:2] or q_tNH.shape[0] != k_tKH.shape[0] or q_tNH.shape[2] != k_tKH.shape[2]:
        raise InputError(
            f"attention of queries {tuple(q_tNH.shape)} over keys {tuple(k_tKH.shape)} and values "
            f"{tuple(v_tKH.shape)}: only self-attention, of each slot over its own sequence, can be prepared"
        )
    if kind.dropout and not shard.has_noise:
        kind = replace(kind, dropout=0.0)
    size, value_size = q_tNH.shape[2], v_tKH.shape[2]
    width = max(size, value_size)  # zeros make both as wide: they change no product
    factor = (size**-0.5 if kind.scale is None else kind.scale) * width**0.5
    if abs(factor - 1.0) > 1e-12:
        q_tNH = q_tNH * factor
    q_tNH, k_tKH = (F.pad(x, (0, width - size)) if width > size else x for x in (q_tNH, k_tKH))
    v_tKH = F.pad(v_tKH, (0, width - value_size)) if width > value_size else v_tKH
    shard.attended.append(
        AttentionExchange(
            num_heads=q_tNH.shape[1], num_kv_heads=k_tKH.shape[1], head_size=width, dtype=q_tNH.dtype, layer=shard.layer
        )
    )
    if shard.group.size == 1:
        out_tNH = _attend_whole(q_tNH, k_tKH, v_tKH, 0, kind=kind, shard=shard)
    else:
        core = partial(_attend_whole, kind=kind, shard=shard)
        out_tNH = ulysses_attention(q_tNH, k_tKH, v_tKH, shard.stage.exchange, core=core)
    shard.note_attention(out_tNH)
    return out_tNH[..., :value_size]


def _attend_whole(
    q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor, first_head: int, *, kind: AttentionRequest, shard: PackShard
) -> Tensor:
    cu_seqlens = shard.cu_seqlens
    window = kind.window
    if window is not None and min(window[: 1 if kind.causal else 2]) + 1 >= shard.longest:
        window = None  # wider than any sequence
    if window is None and kind.is_plain:
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
        some = _Sequence(number=number, kind=kind, window=window, keep=keep, first_head=first_head)
        outs.append(some.attend(q, k, v))
    return torch.cat(outs)


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """Attention of some heads within one sequence, some queries at a time, with all that they may see."""

    number: int
    """The number of the sequence in the pack."""
    kind: AttentionRequest
    window: tuple[int, int] | None
    keep: Keep | None
    first_head: int

    def attend(self, q_LnH: Tensor, k_LnH: Tensor, v_LnH: Tensor) -> Tensor:
        """Attend within the sequence: outputs [L, n, H]."""
        length, num_heads = q_LnH.shape[:2]
        chunk = QUERY_CHUNK
        if self.keep is not None:
            chunk = min(chunk, max(1, DRAWN_AT_ONCE // (num_heads * length)))
        heads = range(self.first_head, self.first_head + num_heads)
        outs = []
        for start in range(0, length, chunk):
            queries = range(start, min(length, start + chunk))
            keys = self._keys(queries, heads, length, q_LnH.device)
            qkv = (x[r.start : r.stop].transpose(0, 1) for x, r in ((q_LnH, queries), (k_LnH, keys), (v_LnH, keys)))
            compute = partial(self._attend_some, queries, keys, heads)
            if self.kind.is_plain:
                out = compute(*qkv)
            else:
                # Masks and what drops are made again in the backward: kept, they would take memory of length squared.
                out = checkpoint(compute, *qkv, use_reentrant=False, preserve_rng_state=False)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    def _keys(self, queries: range, heads: range, length: int, device: torch.device) -> range:
        """The contiguous range of keys that covers all that the queries see."""
        if self.kind.mask is None:
            before, after = self.window or (length, length)
            after = 0 if self.kind.causal else after
            return range(max(0, queries.start - before), min(length, queries.stop + after))
        seen = self._sees(queries, range(length), heads, device)
        if seen.dtype != torch.bool:
            seen = seen > torch.finfo(seen.dtype).min / 2
        numbers = seen.flatten(0, -2).any(0).nonzero()
        return range(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else range(length)

    def _sees(self, queries: range, keys: range, heads: range, device: torch.device) -> Tensor:
        if self.kind.mask is not None:
            return self.kind.mask(self.number, heads, queries, keys)
        positions = (torch.arange(span.start, span.stop, device=device) for span in (queries, keys))
        distance = next(positions)[:, None] - next(positions)
        before, after = self.window or (distance.numel(), distance.numel())
        return (distance <= before) & (distance >= (0 if self.kind.causal else -after))

    def _attend_some(self, queries: range, keys: range, heads: range, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from some queries over some keys and values [n, ..., H]: outputs [n, queries, H]."""
        kind, sees = self.kind, self._sees(queries, keys, heads, q.device)
        if self.keep is None and kind.softcap is None and kind.sinks is None:
            mask = sees if sees.dtype == torch.bool else sees.to(q.dtype)
            mask = mask if mask.dim() == 2 else mask[None]
            return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        logits = (q @ k.transpose(1, 2)) * q.shape[2] ** -0.5
        if kind.softcap is not None:
            logits = kind.softcap * torch.tanh(logits / kind.softcap)
        logits = logits.masked_fill(~sees, -torch.inf) if sees.dtype == torch.bool else logits + sees.to(logits.dtype)
        if kind.sinks is not None:
            sinks = kind.sinks[heads.start : heads.stop, None, None].to(logits.dtype)
            logits = torch.cat([logits, sinks.expand(-1, len(queries), 1)], dim=2)
        weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., : len(keys)]
        if self.keep is not None:
            p = kind.dropout
            weights = weights * self.keep(len(heads), queries, keys) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
        return weights.to(v.dtype) @ v
