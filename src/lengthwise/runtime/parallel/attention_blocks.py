"""Blockwise attention: some queries over some keys, with the log-sum-exps that let partial results be merged.

t queries, s keys, N query heads, K key/value heads, H head size; B equal blocks of L queries and S keys.

A softmax over all keys is put together from softmaxes over parts of them. With lse the logarithm of the sum of
exponentials, parts weigh exp(lse_part - lse), and lse grows by logaddexp, which never leaves the range of numbers,
however large the logits (online softmax, Milakov & Gimelshein 2018). The backward of a part needs the lse and output
of the whole alone (FlashAttention, Dao et al. 2022).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.parallel.first_writes import Runs
from lengthwise.runtime.parallel.tokens import TokenShards


@dataclass(frozen=True, kw_only=True)
class Task:
    """``count`` neighbouring blocks of ``num_queries`` queries that each see ``num_keys`` keys."""

    query: int
    """The first one."""
    num_queries: int
    key: int
    num_keys: int
    causal: bool = False
    """Query n sees the keys up to number n alone; there are as many."""
    count: int = 1

    @property
    def query_runs(self) -> Runs:
        """The rows of its queries."""
        return ((self.query, self.query + self.count * self.num_queries),)

    @property
    def key_runs(self) -> Runs:
        """The rows of its keys."""
        return ((self.key, self.key + self.count * self.num_keys),)

    def queries(self, x: Tensor) -> Tensor:
        """View of the blocks of ``x`` [t, ...]: ``[B, L, ...]``."""
        return _blocks(x, self.query, self.count, self.num_queries)

    def keys(self, x: Tensor) -> Tensor:
        """View of the blocks of ``x`` [s, ...]: ``[B, S, ...]``."""
        return _blocks(x, self.key, self.count, self.num_keys)

    def put_queries(self, x: Tensor, rows: Tensor) -> None:
        """Write changed rows of :meth:`queries` back; they are a view."""

    def write_queries(self, x: Tensor, rows: Tensor) -> None:
        """Overwrite the rows of the queries."""
        self.queries(x).copy_(rows)

    def write_keys(self, x: Tensor, rows: Tensor) -> None:
        """Overwrite the rows of the keys."""
        self.keys(x).copy_(rows)

    def add_to_queries(self, x: Tensor, rows: Tensor) -> None:
        """Add to the rows of the queries."""
        self.queries(x).add_(rows)

    def add_to_keys(self, x: Tensor, rows: Tensor) -> None:
        """Add to the rows of the keys."""
        self.keys(x).add_(rows)

    def attend(self, q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[B, L, N, H]`` and log-sum-exps ``[B, L, N]`` (float32 at least) of every block."""
        return attend_block(q_BLNH, k_BSKH, v_BSKH, causal=self.causal)

    def attend_backward(
        self, dout_BLNH: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_BLNH: Tensor, lse_BLN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``qkv`` of every block, given the output and log-sum-exps over *all* keys."""
        return attend_block_backward(dout_BLNH, qkv, out_BLNH, lse_BLN, causal=self.causal)


def _blocks(x: Tensor, first: int, count: int, size: int) -> Tensor:
    """View of ``count`` neighbouring blocks of ``size`` rows."""
    rows = x.narrow(0, first, count * size)
    return rows[None] if count == 1 else rows.unflatten(0, (count, size))


class LaunchedAlone(Task):
    """A task that is not packed with others into one launch: its queries are in several of them."""


@dataclass(frozen=True, kw_only=True)
class MaskedTask(LaunchedAlone):
    """A task with a mask or bias, soft-capped logits or dropout, without a fused kernel: all logits of a block at once.

    Masks and what dropout keeps are made again in the backward, not saved.
    """

    mask: Callable[[torch.device], Tensor]
    """[L, S] or [N, L, S]: booleans, true where a query sees a key, or what is added to the logits."""
    softcap: float | None = None
    """Logits x become ``softcap * tanh(x / softcap)`` before they are masked."""
    keep: Callable[[torch.dtype], Tensor] | None = None
    """[N, L, S]: the factors of dropout in a dtype, 0 or 1 / (1 - p)."""

    def attend(self, q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exps of the block; -inf and zeros for queries that see none of its keys."""
        q, k, v = _heads_first(q_BLNH, k_BSKH, v_BSKH)
        logits = self._masked(self._capped(q, k))
        lse = logits.logsumexp(-1)
        weights = (logits - finite(lse)[..., None]).exp()
        weights = weights if self.keep is None else weights * self.keep(weights.dtype)
        return (weights.to(v.dtype) @ v).transpose(1, 2), lse.transpose(1, 2)

    def attend_backward(
        self, dout_BLNH: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_BLNH: Tensor, lse_BLN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``qkv`` of the block, given the output and log-sum-exps over *all* keys."""
        q, k, v = _heads_first(*qkv)
        dout, out, lse = (x.transpose(1, 2) for x in (dout_BLNH, out_BLNH, lse_BLN))
        wide, capped = lse.dtype, self._capped(q, k)
        weights = (self._masked(capped) - finite(lse)[..., None]).exp()
        dweights, dropped = (dout @ v.transpose(2, 3)).to(wide), weights
        if self.keep is not None:
            factors = self.keep(wide)
            dweights, dropped = dweights * factors, weights * factors
        dlogits = weights * (dweights - (dout.to(wide) * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        if self.softcap is not None:
            dlogits = dlogits * (1.0 - (capped / self.softcap).square())
        dlogits = dlogits.to(q.dtype)
        dv, dk = dropped.to(v.dtype).transpose(2, 3) @ dout, dlogits.transpose(2, 3) @ q
        dk, dv = (x.unflatten(1, (qkv[1].shape[2], -1)).sum(2).transpose(1, 2) for x in (dk, dv))
        return (dlogits @ k).transpose(1, 2), dk, dv

    def _capped(self, q: Tensor, k: Tensor) -> Tensor:
        """Soft-capped logits [B, N, L, S] before the mask, in float32 at least."""
        logits = (q @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _masked(self, logits: Tensor) -> Tensor:
        mask = self.mask(logits.device)
        return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(logits.dtype)


def finite(lse: Tensor) -> Tensor:
    """Log-sum-exps with 0 for those of queries that saw no key, to subtract from others."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def block_tasks(
    view: AttentionView, shards: TokenShards, *, rank: int, source: int, rows: np.ndarray | None = None
) -> tuple[Task, ...]:
    """Attention tasks between the queries of ``rank`` and the keys of ``source``, both in the order of ``view``.

    Every query is in one task at most: what it sees of another rank's keys of its sequence are the first ones. In a
    prefix tree it is also in one for each segment that its own continues, and sees all of that one's keys.

    ``rows``: of the keys that are here of another rank's, if not all.
    """
    queries, keys = (np.sort(view.places[shards.places[shard_rank]]) for shard_rank in (rank, source))
    keys = keys if rows is None or rank == source else keys[rows]
    within = _tasks_within(view, queries, keys, is_local=rank == source)
    return tuple(within if view.tree is None else [*within, *_tasks_before(view.tree, queries, keys)])


def rows_that_travel(view: AttentionView, shards: TokenShards) -> tuple[np.ndarray | None, ...]:
    """For each rank the rows, in the order of ``view``, of keys of sequences that other ranks hold tokens of, too; None
    where those are all of its rows, where no plan has placed any sequence, and in prefix trees.
    """
    if not shards.is_placed or view.tree is not None:
        return (None,) * len(shards.places)
    bounds = np.asarray(view.cu_seqlens)
    sequences = [np.searchsorted(bounds, np.sort(view.places[p]), side="right") - 1 for p in shards.places]
    num_ranks = np.bincount(np.concatenate([np.unique(of_rank) for of_rank in sequences]), minlength=len(bounds))
    travels = [num_ranks[of_rank] > 1 for of_rank in sequences]
    return tuple(None if flags.all() else np.flatnonzero(flags) for flags in travels)


def _tasks_before(tree: PrefixTree, queries: np.ndarray, keys: np.ndarray) -> Iterator[Task]:
    """The task of each segment that others continue: all of their queries see all of its keys."""
    for segment, end in enumerate(tree.ends):
        rows = np.searchsorted(queries, [tree.bounds[segment + 1], tree.bounds[end]]).tolist()
        columns = np.searchsorted(keys, tree.bounds[segment : segment + 2]).tolist()
        if rows[0] < rows[1] and columns[0] < columns[1]:
            yield Task(
                query=rows[0], num_queries=rows[1] - rows[0], key=columns[0], num_keys=columns[1] - columns[0]
            )  # fmt: skip


def _tasks_within(view: AttentionView, queries: np.ndarray, keys: np.ndarray, *, is_local: bool) -> list[Task]:
    """The tasks of each sequence, or segment of a tree, by itself; ``is_local``: queries and keys are of one rank."""
    bounds = np.asarray(view.cu_seqlens)
    sequence = np.searchsorted(bounds, queries, side="right") - 1
    starts = np.searchsorted(keys, bounds[sequence])
    is_local_causal = view.causal and is_local
    ends = np.searchsorted(keys, queries if view.causal and not is_local_causal else bounds[sequence + 1])
    changes = np.flatnonzero((np.diff(sequence, prepend=-1) != 0) | (np.diff(ends, prepend=-1) != 0))
    tasks: list[Task] = []
    for first, end in zip(changes.tolist(), [*changes[1:].tolist(), len(queries)]):
        task = Task(
            query=first, num_queries=end - first, key=int(starts[first]), num_keys=int(ends[first] - starts[first]),
            causal=is_local_causal,
        )  # fmt: skip
        if task.num_keys:
            tasks.append(task)
    return joined(tasks)


def joined(tasks: Sequence[Task]) -> list[Task]:
    """Merge neighbouring tasks of equal size into one."""
    joined: list[Task] = []
    for task in tasks:
        if joined and _continues(joined[-1], task):
            joined[-1] = replace(joined[-1], count=joined[-1].count + 1)
        else:
            joined.append(task)
    return joined


def _continues(last: Task, task: Task) -> bool:
    after = last.query + last.count * last.num_queries, last.key + last.count * last.num_keys
    return (task.query, task.key) == after and (task.num_queries, task.num_keys) == (last.num_queries, last.num_keys)


def attend_block(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output ``[B, L, N, H]`` and log-sum-exps ``[B, L, N]`` (float32 at least) of every block."""
    q, k, v = _heads_first(q_BLNH, k_BSKH, v_BSKH)
    if q.is_cpu:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        out, lse = _plain(q, k, v, causal=causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_block_backward(
    dout_BLNH: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_BLNH: Tensor, lse_BLN: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``qkv`` of every block, given the output and log-sum-exps over *all* keys, not the block's alone."""
    q_BLNH, k_BSKH, v_BSKH = qkv
    q, k, v = _heads_first(q_BLNH, k_BSKH, v_BSKH)
    dout, out, lse = (x.transpose(1, 2) for x in (dout_BLNH, out_BLNH, lse_BLN))
    if q.is_cpu:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, causal
        )
    else:
        dq, dk, dv = _plain_backward(dout, q, k, v, out, lse, causal=causal)
    num_kv_heads = k_BSKH.shape[2]
    if q.shape[1] > num_kv_heads:
        dk, dv = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads_first(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, tokens, H] of all three: the kernels below take as many key/value heads as query heads."""
    group_size = q_BLNH.shape[2] // k_BSKH.shape[2]
    k, v = (x if group_size == 1 else x.repeat_interleave(group_size, dim=2) for x in (k_BSKH, v_BSKH))
    return q_BLNH.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _masked(logits: Tensor, *, causal: bool) -> Tensor:
    if not causal:
        return logits
    rows = torch.arange(logits.shape[-2], device=logits.device)[:, None]
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) > rows, -torch.inf)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Unfused attention for devices and dtypes without a kernel; ``[B, N, L, H]``, all logits of a block at once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = _masked((q @ k.transpose(2, 3)).to(wide) * q.shape[-1] ** -0.5, causal=causal)
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp().to(v.dtype) @ v, lse


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide, scale = lse.dtype, q.shape[-1] ** -0.5
    logits = _masked((q @ k.transpose(2, 3)).to(wide) * scale, causal=causal)
    weights = (logits - lse[..., None]).exp()
    dv = weights.to(v.dtype).transpose(2, 3) @ dout
    inner = (dout.to(wide) * out).sum(-1, keepdim=True)
    dlogits = (weights * ((dout @ v.transpose(2, 3)).to(wide) - inner) * scale).to(q.dtype)
    return dlogits @ k, dlogits.transpose(2, 3) @ q, dv
