"""Groups of heads, and how the ranks of Ulysses trade tokens for the heads of one group at a time (UPipe's idea, 2026).

A key/value head whose queries are in several groups comes with the first and stays to the last of them.

T tokens of the pack, t of this rank, N query heads, n of one rank in one group, K, k key/value heads, H head size, p
ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.head_split import head_bounds
from lengthwise.runtime.comm.exchange import Exchange
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.parallel.head_exchange import UlyssesShards
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import ring_backward, ring_forward

Run = tuple[int, int]
"""The first of neighbouring heads, and one past the last."""


@dataclass(frozen=True, kw_only=True)
class RankHeads:
    """Heads of one rank in one group."""

    queries: Run
    reads: Run
    """Key/value heads that the queries read."""
    comes: Run
    """Those of them that no group before has read."""
    leaves: Run
    """Those of them that no group after reads."""


def split_heads_in_groups(num_heads: int, num_kv_heads: int, *, degree: int, count: int) -> list[list[RankHeads]]:
    """For each of ``count`` groups the heads of each rank: whole key/value groups where there are enough of them."""
    size = num_heads // num_kv_heads
    of_ranks = []
    for start, end in pairwise(head_bounds(num_heads, num_kv_heads, degree=degree)):
        unit = size if start % size == end % size == 0 and (end - start) // size >= count else 1
        units = (end - start) // unit
        cuts = [start + number * units // count * unit for number in range(count + 1)]
        runs = list(pairwise(cuts))
        reads = [(a // size, -(-b // size)) if b > a else (-1, -1) for a, b in runs]
        heads, read_before = [], start // size
        for number, (queries, (first, last)) in enumerate(zip(runs, reads)):
            if first < 0:
                nothing = (read_before, read_before)
                heads.append(RankHeads(queries=queries, reads=nothing, comes=nothing, leaves=nothing))
                continue
            following = next((run[0] for run in reads[number + 1 :] if run[0] >= 0), last)
            comes, leaves = (max(first, read_before), last), (first, min(last, following))
            heads.append(RankHeads(queries=queries, reads=(first, last), comes=comes, leaves=leaves))
            read_before = last
        of_ranks.append(heads)
    return [list(group) for group in zip(*of_ranks)]


class HeadGroup:
    """One group of heads: which of each rank, and the rows of the weights that make them."""

    def __init__(self, heads: Sequence[RankHeads], rank: int, *, group_size: int, device: torch.device) -> None:
        """``heads``: of each rank; ``group_size``: query heads of each key/value head."""
        self.heads, self.mine = heads, heads[rank]
        queries = _all_of(item.queries for item in heads)
        self.num_queries, self.num_coming = len(queries), sum(count_heads(item.comes) for item in heads)
        rows = queries // group_size * (group_size + 2) + queries % group_size
        self.query_heads = to_device(queries, device)
        self.comes, self.leaves = (
            to_device(np.concatenate([rows, keys, keys + 1]), device)
            for keys in (
                _all_of(run) * (group_size + 2) + group_size
                for run in ([item.comes for item in heads], [item.leaves for item in heads])
            )
        )
        """Rows of the projection, of H each: of the queries, and of the keys and values that come, or that leave."""
        self.coming_heads, self.leaving_heads = (
            to_device(_all_of(run), device) for run in ([item.comes for item in heads], [item.leaves for item in heads])
        )
        """Key/value heads that come, or that leave, rank by rank: one that several ranks read is there for each."""
        (start, end), (first, last) = self.mine.queries, self.mine.reads
        is_even = end - start == (last - first) * group_size or last - first == 1
        self.reads = None if is_even else to_device(np.arange(start, end) // group_size - first, device)


def _all_of(runs: Any) -> np.ndarray:
    return np.concatenate([np.arange(*run) for run in runs]).astype(np.int64)


def count_heads(run: Run) -> int:
    """How many heads a run has."""
    return run[1] - run[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadGroups:
    """The groups of heads of one attention, for one rank, and the exchanges of each."""

    exchange: UlyssesShards
    ring: Ring
    """Of this rank alone, with all tokens."""
    groups: tuple[HeadGroup, ...]

    def to_heads(self, pieces: Sequence[tuple[Tensor, Callable[[RankHeads], Run]]], group: HeadGroup) -> list[Tensor]:
        """Trade tokens for heads: of each ``[t, n, H]`` of all ranks' heads in the group, this rank's ``[T, n, H]``."""
        counts = [[count_heads(of(heads)) for heads in group.heads] for _, of in pieces]
        parts = zip(*(piece.split(count, dim=1) for (piece, _), count in zip(pieces, counts)))
        sent = [torch.cat(part, dim=1).flatten() for part in parts]
        rank, head_size = self.exchange.group.rank, pieces[0][0].shape[2]
        own_counts = [count[rank] for count in counts]
        receive = [size * sum(own_counts) * head_size for size in self.exchange.sizes]
        sizes = [len(part) for part in sent]
        sent[:] = [torch.cat(sent)]  # what is sent is freed once it is
        arrived = self.exchange.group.all_to_all(sent.pop(), sizes, receive)
        arrived = arrived.view(sum(self.exchange.sizes), sum(own_counts), head_size)
        arrived = arrived if self.exchange.into is None else arrived[self.exchange.into]
        return [part.contiguous() for part in arrived.split(own_counts, dim=1)]

    def to_tokens(self, pieces: Sequence[Tensor], of: Sequence[Callable[[RankHeads], Run]], group: HeadGroup) -> Tensor:
        """Trade heads for tokens: ``[t, n, H]`` of all ranks' heads, piece by piece, of this rank's ``[T, n, H]``."""
        joined = torch.cat(list(pieces), dim=1)
        joined = joined if self.exchange.back is None else joined[self.exchange.back]
        counts = [[count_heads(run(heads)) for run in of] for heads in group.heads]
        sizes, own_rows = self.exchange.sizes, self.exchange.sizes[self.exchange.group.rank]
        row_size, head_size = joined[0].numel() if len(joined) else 0, pieces[0].shape[2]
        receive = [own_rows * sum(count) * head_size for count in counts]
        arrived = self.exchange.group.all_to_all(joined.flatten(), [size * row_size for size in sizes], receive)
        by_rank = [
            part.view(own_rows, sum(count), head_size).split(count, dim=1)
            for part, count in zip(arrived.split(receive), counts)
        ]
        return torch.cat([piece for number in range(len(of)) for piece in (parts[number] for parts in by_rank)], dim=1)

    def exchanges(self, head_size: int, dtype: torch.dtype, *, backward: bool) -> list[Exchange]:
        """What attention in these groups over queries, keys and values issues, in order, or its backward, which trades
        these and outputs again; one rank alone issues nothing.
        """
        exchange, rank = self.exchange, self.exchange.group.rank
        mine, issued = exchange.sizes[rank], []
        for group in self.groups if exchange.group.size > 1 else ():
            queries, comes, leaves = (
                [count_heads(run) for run in runs]
                for runs in zip(*((heads.queries, heads.comes, heads.leaves) for heads in group.heads))
            )
            for to_heads, counts in (
                (True, [(3 if backward else 1) * n + 2 * k for n, k in zip(queries, comes)]),
                (False, [n + (2 * k if backward else 0) for n, k in zip(queries, leaves)]),
            ):
                of_ranks = [mine * count * head_size for count in counts]
                of_tokens = [size * counts[rank] * head_size for size in exchange.sizes]
                trade = Exchange(group=exchange.group, dtype=dtype, send=of_ranks, receive=of_tokens)
                issued.append(trade if to_heads else trade.reversed)
        return issued


def queries_of(heads: RankHeads) -> Run:
    """Query heads of a rank in a group."""
    return heads.queries


def coming_of(heads: RankHeads) -> Run:
    """Key/value heads that come to a rank with a group."""
    return heads.comes


def leaving_of(heads: RankHeads) -> Run:
    """Key/value heads that no group after this one reads."""
    return heads.leaves


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of this rank's heads, ``[T, k, H]`` each; or their gradients."""
Stay = list[tuple[KeysValues | None, KeysValues | None]]
"""One pair: keys and values of groups before that the next one reads too, and their gradients so far."""


def trade_group(
    qkv: tuple[Tensor, Tensor, Tensor],
    grouped: HeadGroups,
    group: HeadGroup,
    present: KeysValues | None,
    beside: Sequence[Tensor] = (),
) -> tuple[Tensor, KeysValues, list[Tensor]]:
    """This rank's queries ``[T, n, H]``, its keys and values together with those ``present``, and what comes beside.

    ``qkv``: of this rank's tokens, with all ranks' heads of the group; ``beside``: of its query heads, too.
    """
    of = (queries_of, coming_of, coming_of)
    q, k, v, *others = grouped.to_heads([*zip(qkv, of), *((piece, queries_of) for piece in beside)], group)
    if present is not None:
        k, v = (torch.cat([old, new], dim=1) if new.shape[1] else old for old, new in zip(present, (k, v)))
    return q, (k, v), others


def attend_group(
    q_TnH: Tensor, present: KeysValues, group: HeadGroup, ring: Ring, sinks_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a group's queries, and its log-sum-exps ``[T, n]``; empty where this rank has none."""
    if not q_TnH.shape[1]:
        return q_TnH, q_TnH.new_empty(0)
    return ring_forward(q_TnH, *keys_read(present, group), ring, sinks_N=sinks_N)


def trade_group_gradients(
    arrived: list[Any], lse: Tensor, stay: Stay, grouped: HeadGroups, group: HeadGroup, ring: Ring
) -> Tensor:
    """Gradients ``[t, heads, H]`` of all ranks' heads: of queries, then of the keys and the values that leave.

    ``arrived``: queries, keys with values, outputs, and gradients of outputs of the group; taken out of it, so that
    they are freed before gradients are sent. ``stay``: changed to what the next group needs.
    """
    (q, present, out, dout), (_, dpresent) = arrived, stay.pop()
    arrived.clear()
    dpresent, dq = grown_gradients(dpresent, present[0], torch.promote_types(q.dtype, torch.float32)), q
    if q.shape[1]:
        dq, *dkv = ring_backward(dout, q, *keys_read(present, group), out, lse, ring)
        add_to_read(dpresent, dkv, group)
        del dkv
    num_left = count_heads(group.mine.leaves)
    left = [dx[:, :num_left].to(q.dtype) for dx in dpresent]
    stay.append((keys_that_stay(present, group), keys_that_stay(dpresent, group)))
    del q, out, dout, present, dpresent
    return grouped.to_tokens([dq, *left], [queries_of, leaving_of, leaving_of], group)


def keys_read(present: KeysValues, group: HeadGroup) -> KeysValues:
    """Keys and values as the queries of a group read them."""
    if group.reads is None:
        return present
    return present[0][:, group.reads], present[1][:, group.reads]


def add_to_read(dpresent: KeysValues, dkv: Sequence[Tensor], group: HeadGroup) -> None:
    """Add gradients of what :func:`keys_read` gives."""
    for total, dx in zip(dpresent, dkv):
        if group.reads is None:
            total += dx
        else:
            total.index_add_(1, group.reads, dx.to(total.dtype))


def keys_that_stay(present: KeysValues, group: HeadGroup) -> KeysValues | None:
    """Keys and values that later groups read too, without the storage of those that no other does; None: there are
    none.
    """
    num_left = count_heads(group.mine.leaves)
    if num_left == present[0].shape[1]:
        return None
    return present[0][:, num_left:].contiguous(), present[1][:, num_left:].contiguous()


def grown_gradients(dpresent: KeysValues | None, keys: Tensor, wide: torch.dtype) -> KeysValues:
    """Gradients of keys and values so far, with zeros for those that came."""
    before = 0 if dpresent is None else dpresent[0].shape[1]
    room = (len(keys), keys.shape[1] - before, keys.shape[2])
    if dpresent is not None and not room[1]:
        return dpresent
    new = (keys.new_zeros(room, dtype=wide), keys.new_zeros(room, dtype=wide))
    if dpresent is None or not before:
        return new
    return torch.cat([dpresent[0], new[0]], dim=1), torch.cat([dpresent[1], new[1]], dim=1)
