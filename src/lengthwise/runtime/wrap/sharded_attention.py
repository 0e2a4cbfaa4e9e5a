"""Attention of somebody else's layer on a shard, under any method that shares sequences with whole weights.

t slots of this rank, T of the pack, N query heads, K key/value heads, H head size. A model whose slots are frames has
rows of heads: each of its R places in a frame attends across frames by itself, with heads of its own; N is R times the
model's heads then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import InputError, Setting
from lengthwise.runtime.models.varlen_attention import attend, attend_varlen, takes_windows
from lengthwise.runtime.parallel.attention_blocks import LaunchedAlone, MaskedTask, Task
from lengthwise.runtime.parallel.group_attention import attend_in_groups
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.slice_attention import attend_slice
from lengthwise.runtime.parallel.tokens import TokenRun, TokenShards
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.counter_rng import attention_keep
from lengthwise.runtime.wrap.custom_masks import OF_SHARED_PREFIXES
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
    if shard.tree is not None and (kind.mask is not None or not kind.causal):
        raise InputError(
            f"{OF_SHARED_PREFIXES} "
            + ("has masks or biases of its own" if kind.causal or kind.mask is not None else "looks both ways")
            + "; leave share_prefixes out"
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
    kind = replace(kind, window=_narrower(kind, shard.longest))
    out_tNH = _attend(q_tNH, k_tKH, v_tKH, kind, shard)
    shard.note_attention(out_tNH)
    return out_tNH[..., :value_size]


def _attend(q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, kind: AttentionRequest, shard: PackShard) -> Tensor:
    """Attend by the method of the layer, with all heads at once or in groups of them."""
    call: dict[str, Any] = {
        "num_heads": q_tNH.shape[1], "num_kv_heads": k_tKH.shape[1], "layer": shard.layer, "causal": kind.causal
    }  # fmt: skip
    grouped = shard.in_head_groups(**call)
    if shard.dtype is not None and (grouped is not None or shard.group.size > 1 or shard.part is not None):
        # Autocast casts what an attention of torch is given, but neither what kernels are nor what ranks exchange.
        q_tNH, k_tKH, v_tKH = (x.to(shard.dtype) for x in (q_tNH, k_tKH, v_tKH))
    if grouped is not None:
        ring_of = partial(_ring_of, grouped.ring, kind=kind, shard=shard)
        return attend_in_groups(q_tNH, k_tKH, v_tKH, grouped, ring_of=ring_of, sinks_N=kind.sinks)
    core = partial(_attend_whole if shard.part is None else _attend_in_slice, kind=kind, shard=shard)
    if shard.group.size == 1:
        return core(q_tNH, k_tKH, v_tKH, 0)
    sharing = shard.sharing(**call)
    if sharing.ring is not None:
        assert shard.part is None, "slices are of methods under which ranks have whole sequences"
        core = partial(_attend_in_ring, kind=kind, shard=shard, ring=sharing.ring)
    return sharing.attend(q_tNH, k_tKH, v_tKH, core=core)


def _attend_whole(
    q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor, first_head: int, *, kind: AttentionRequest, shard: PackShard
) -> Tensor:
    if shard.tree is not None:
        return _attend_in_ring(q_TnH, k_TkH, v_TkH, first_head, kind=kind, shard=shard, ring=shard.ring_alone)
    cu_seqlens = shard.cu_seqlens
    if kind.window is None and kind.is_plain:
        return attend(q_TnH, k_TkH, v_TkH, cu_seqlens, causal=kind.causal)
    if kind.is_plain and takes_windows(q_TnH):
        return attend_varlen(q_TnH, k_TkH, v_TkH, cu_seqlens, causal=kind.causal, window=kind.window)
    group_size = q_TnH.shape[1] // k_TkH.shape[1]
    k_TnH, v_TnH = (x if group_size == 1 else x.repeat_interleave(group_size, dim=1) for x in (k_TkH, v_TkH))
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    outs = []
    for number, (q, k, v) in enumerate(zip(*(x.split(lengths) for x in (q_TnH, k_TnH, v_TnH)))):
        some = _Sequence.of(number, range(first_head, first_head + q_TnH.shape[1]), kind=kind, shard=shard)
        outs.append(some.attend(q, k, v))
    return torch.cat(outs)


def _attend_in_ring(
    q_TnH: Tensor,
    k_TkH: Tensor,
    v_TkH: Tensor,
    first_head: int,
    *,
    kind: AttentionRequest,
    shard: PackShard,
    ring: Ring,
) -> Tensor:
    """Attend from the tokens of this rank and its neighbours, while keys and values go round a ring."""
    heads = range(first_head, first_head + q_TnH.shape[1])
    sinks = None if kind.sinks is None else kind.sinks[heads.start : heads.stop]
    return ring_attention(q_TnH, k_TkH, v_TkH, _ring_of(ring, q_TnH, heads, kind=kind, shard=shard), sinks_N=sinks)


def _attend_in_slice(
    q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor, first_head: int, *, kind: AttentionRequest, shard: PackShard
) -> Tensor:
    """Attend from the tokens of a slice over those of the slices before and its own.

    Raises:
        InputError: a query may see what is behind it, or slices that are not there yet.
    """
    part = shard.part
    assert part is not None, "the pack is computed in slices"
    if kind.mask is not None or not kind.causal:
        raise InputError(
            "slices of a sequence see what is before them alone, and this model's attention "
            + ("looks both ways" if kind.mask is None else "has masks or biases of its own")
            + f"; plan with {Setting.SLICES}=none"
        )
    heads = range(first_head, first_head + q_TnH.shape[1])
    sinks = None if kind.sinks is None else kind.sinks[heads.start : heads.stop]
    ring: Ring | None = part.ring
    is_plain = replace(kind, sinks=None).is_plain
    if is_plain and kind.window is not None:
        ring = part.ring.in_window(q_TnH, part.cu_seqlens, kind.window, causal=True, num_before=part.num_before)
    if ring is None or not is_plain:
        query_runs, key_runs = (
            TokenShards(places=(np.arange(some.start, some.stop),)).runs(shard.cu_seqlens, 0)
            for some in (part.tokens, part.seen)
        )
        tasks = _tasks_between(query_runs, key_runs, heads, kind, shard)
        ring = replace(part.ring, tasks=(tuple(tasks),), packed_tasks={})
    keys = part.keys_of(shard.counts.all_attention - 1)
    return attend_slice(q_TnH, k_TkH, v_TkH, part, keys, ring=ring, sinks_N=sinks)


def _ring_of(ring: Ring, q_tnH: Tensor, heads: range, *, kind: AttentionRequest, shard: PackShard) -> Ring:
    """The ring with tasks of these heads, where what a query of ``q_tnH`` sees is more than causal or open."""
    if replace(kind, sinks=None).is_plain:
        if kind.window is None:
            return ring
        launched = ring.in_window(q_tnH, shard.cu_seqlens, kind.window, causal=kind.causal)
        if launched is not None and shard.tree is None:
            return launched
    tasks = (_tasks(ring, source, heads, kind, shard) for source in range(ring.group.size))
    return replace(ring, tasks=tuple(map(tuple, tasks)), packed_tasks={})


def _tasks(ring: Ring, source: int, heads: range, kind: AttentionRequest, shard: PackShard) -> Iterator[Task]:
    """Attention tasks between the queries of this rank and the keys of ``source``, some queries at a time."""
    if ring is shard.ring_alone:
        shares = TokenShards(places=(np.arange(shard.cu_seqlens[-1]),))
    else:
        shares = shard.stage.shards.merged(shard.group.size // ring.group.size)
    query_runs, key_runs = (_runs(shard, shares, rank) for rank in (ring.group.rank, source))
    yield from _tasks_between(query_runs, key_runs, heads, kind, shard)


def _tasks_between(
    query_runs: Sequence[TokenRun], key_runs: Sequence[TokenRun], heads: range, kind: AttentionRequest, shard: PackShard
) -> Iterator[Task]:
    """Attention tasks between runs of queries and those keys of their own sequences, some queries at a time."""
    keys_by_sequence: dict[int, list[TokenRun]] = {}
    for run in key_runs:
        keys_by_sequence.setdefault(run.sequence, []).append(run)
    for query_run in query_runs:
        number = query_run.sequence
        path: tuple[int, ...] = (number,)
        if shard.tree is not None:
            path = shard.tree.paths[number]
            number = int(np.searchsorted(shard.cu_seqlens, shard.tree.bounds[number], side="right")) - 1
        sequence = _Sequence.of(number, heads, kind=kind, shard=shard)
        for key_run in (run for segment in path for run in keys_by_sequence.get(segment, [])):
            yield from sequence.tasks(query_run, key_run)


def _runs(shard: PackShard, shares: TokenShards, rank: int) -> list[TokenRun]:
    """The tokens of a rank as runs; in a prefix tree of its segments, whose positions go on."""
    if shard.tree is None:
        return shares.runs(shard.cu_seqlens, rank)
    return [run.after(shard.tree.starts[run.sequence]) for run in shares.runs(shard.tree.bounds, rank)]


def _narrower(kind: AttentionRequest, longest: int) -> tuple[int, int] | None:
    """The window, or None if it is wider than any sequence."""
    if kind.window is None or min(kind.window[: 1 if kind.causal else 2]) + 1 >= longest:
        return None
    return kind.window


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """Attention of some heads within one sequence, some queries at a time, with all that they may see."""

    number: int
    """The number of the sequence in the pack."""
    kind: AttentionRequest
    keep: Keep | None
    heads: range

    @classmethod
    def of(cls, number: int, heads: range, *, kind: AttentionRequest, shard: PackShard) -> "_Sequence":
        """Attention within sequence ``number`` of a pack."""
        keep = None
        if kind.dropout:
            sequence = shard.ids[number] if number < len(shard.ids) else -1
            keep = partial(attention_keep, shard, sequence, kind.call, heads.start, kind.dropout)
        return cls(number=number, kind=kind, keep=keep, heads=heads)

    def attend(self, q_LnH: Tensor, k_LnH: Tensor, v_LnH: Tensor) -> Tensor:
        """Attend within the sequence: outputs [L, n, H]."""
        outs = []
        for queries in self._some(range(len(q_LnH)), len(q_LnH)):
            keys = self._keys(queries, len(q_LnH), q_LnH.device)
            qkv = (x[r.start : r.stop].transpose(0, 1) for x, r in ((q_LnH, queries), (k_LnH, keys), (v_LnH, keys)))
            compute = partial(self._attend_some, queries, keys)
            if self.kind.is_plain:
                out = compute(*qkv)
            else:
                # Masks and what drops are made again in the backward: kept, they would take memory of length squared.
                out = checkpoint(compute, *qkv, use_reentrant=False, preserve_rng_state=False)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    def tasks(self, query_run: TokenRun, key_run: TokenRun) -> Iterator[Task]:
        """Attention tasks between a run of this rank's queries and a run of some rank's keys."""
        kind = self.kind
        for queries in self._some(query_run.positions, len(key_run.positions)):
            keys = key_run.positions
            if kind.mask is None:
                before, after = self._reach(query_run.positions.stop + keys.stop)
                keys = range(max(keys.start, queries.start - before), min(keys.stop, queries.stop + after))
                if not keys:
                    continue
            rows: dict[str, Any] = {
                "query": query_run.first + queries.start - query_run.positions.start, "num_queries": len(queries),
                "key": key_run.first + keys.start - key_run.positions.start, "num_keys": len(keys),
            }  # fmt: skip
            is_special = kind.mask is not None or kind.softcap is not None or self.keep is not None
            if not is_special and queries.stop - 1 - keys.start <= before and keys.stop - 1 - queries.start <= after:
                yield LaunchedAlone(**rows)  # every query sees every key
                continue
            yield MaskedTask(
                **rows, mask=partial(self._sees, queries, keys), softcap=kind.softcap,
                keep=None if self.keep is None else partial(self._factors, queries, keys),
            )  # fmt: skip

    def _some(self, queries: range, num_keys: int) -> Iterator[range]:
        """Queries that are computed at once."""
        chunk = QUERY_CHUNK
        if self.keep is not None:
            chunk = min(chunk, max(1, DRAWN_AT_ONCE // (len(self.heads) * num_keys)))
        for start in range(queries.start, queries.stop, chunk):
            yield range(start, min(queries.stop, start + chunk))

    def _reach(self, length: int) -> tuple[int, int]:
        """How many slots before and after its own each slot sees, at most ``length``."""
        before, after = self.kind.window or (length, length)
        return before, 0 if self.kind.causal else after

    def _keys(self, queries: range, length: int, device: torch.device) -> range:
        """The contiguous range of keys that covers all that the queries see."""
        if self.kind.mask is None:
            before, after = self._reach(length)
            return range(max(0, queries.start - before), min(length, queries.stop + after))
        seen = self._sees(queries, range(length), device)
        if seen.dtype != torch.bool:
            seen = seen > torch.finfo(seen.dtype).min / 2
        numbers = seen.flatten(0, -2).any(0).nonzero()
        return range(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else range(length)

    def _sees(self, queries: range, keys: range, device: torch.device) -> Tensor:
        if self.kind.mask is not None:
            return self.kind.mask(self.number, self.heads, queries, keys)
        positions = (torch.arange(span.start, span.stop, device=device) for span in (queries, keys))
        distance = next(positions)[:, None] - next(positions)
        before, after = self._reach(queries.stop + keys.stop)
        return (distance <= before) & (distance >= -after)

    def _factors(self, queries: range, keys: range, dtype: torch.dtype) -> Tensor:
        """[n, queries, keys] the factors of dropout, 0 or 1 / (1 - p)."""
        assert self.keep is not None, "attention weights drop out"
        p = self.kind.dropout
        return self.keep(len(self.heads), queries, keys).to(dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)

    def _attend_some(self, queries: range, keys: range, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from some queries over some keys and values [n, ..., H]: outputs [n, queries, H]."""
        kind, sees = self.kind, self._sees(queries, keys, q.device)
        if self.keep is None and kind.softcap is None and kind.sinks is None:
            mask = sees if sees.dtype == torch.bool else sees.to(q.dtype)
            mask = mask if mask.dim() == 2 else mask[None]
            return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        logits = (q @ k.transpose(1, 2)) * q.shape[2] ** -0.5
        if kind.softcap is not None:
            logits = kind.softcap * torch.tanh(logits / kind.softcap)
        logits = logits.masked_fill(~sees, -torch.inf) if sees.dtype == torch.bool else logits + sees.to(logits.dtype)
        if kind.sinks is not None:
            sinks = kind.sinks[self.heads.start : self.heads.stop, None, None].to(logits.dtype)
            logits = torch.cat([logits, sinks.expand(-1, len(queries), 1)], dim=2)
        weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., : len(keys)]
        if self.keep is not None:
            weights = weights * self._factors(queries, keys, weights.dtype)
        return weights.to(v.dtype) @ v
