"""How p ranks share an attention: Ulysses among each u neighbouring ranks, and a ring across these groups.

Ulysses alone is u = p, a ring alone u = 1. In between, the ranks form a grid (USP, Fang & Zhao 2024; 2D-attention of
LoongTrain, Gu et al. 2024): u ranks trade their tokens for heads, and the keys and values of these heads go round the
p / u groups. With ``all_gather`` they go to all groups at once.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.core.head_split import head_bounds
from lengthwise.runtime.comm.exchange import Exchange
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.parallel.head_exchange import Core, UlyssesShards, ulysses_attention
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import ring_attention


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSharing:
    """One rank's place in the grid of an attention."""

    exchange: UlyssesShards | None
    """The all-to-alls with its neighbours; None: it has none."""
    ring: Ring | None
    """The ring that its keys and values go round; None: its neighbours have all tokens."""

    def attend(
        self,
        q_tNH: Tensor,
        k_tKH: Tensor,
        v_tKH: Tensor,
        *,
        core: Core | None = None,
        kept_attention: KeptAttention | None = None,
    ) -> Tensor:
        """Attention of all heads of this rank's tokens, ``[t, N, H]``.

        ``core``: attends from the tokens of the neighbours, by :attr:`ring` if there is one; softmax attention within
        the sequences, if left out. ``kept_attention``: what such an attention keeps for a second forward.
        """
        if core is None and self.ring is not None:
            core = partial(_attend_in_ring, ring=self.ring, kept_attention=kept_attention)
        if self.exchange is not None:
            return ulysses_attention(q_tNH, k_tKH, v_tKH, self.exchange, core=core, kept_attention=kept_attention)
        assert core is not None, "a rank without neighbours is in a ring"
        return core(q_tNH, k_tKH, v_tKH, 0)

    def exchanges(
        self, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, *, backward: bool = False
    ) -> list[Exchange]:
        """What :meth:`attend` issues, in order, or its backward."""
        ulysses = [] if self.exchange is None else _trades(self.exchange, num_heads, num_kv_heads, head_size, dtype)
        to_heads, to_tokens = ulysses[:1], ulysses[1:]
        within: list[Exchange] = []
        if self.ring is not None:
            if self.exchange is not None:
                num_kv_heads = _heads(self.exchange, num_heads, num_kv_heads)[self.exchange.group.rank][2]
            within = list(self.ring.exchanges(2 * num_kv_heads * head_size, dtype, backward=backward))
        if backward:
            return [*(trade.reversed for trade in to_tokens), *within, *(trade.reversed for trade in to_heads)]
        return [*to_heads, *within, *to_tokens]


def _attend_in_ring(
    q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, first_head: int, *, ring: Ring, kept_attention: KeptAttention | None
) -> Tensor:
    return ring_attention(q_tNH, k_tKH, v_tKH, ring, kept_attention=kept_attention)


def _heads(exchange: UlyssesShards, num_heads: int, num_kv_heads: int) -> list[tuple[int, int, int]]:
    """Query heads of each rank, key/value heads that are sent to it, and as many as it attends with."""
    group_size = num_heads // num_kv_heads
    heads = []
    for start, end in pairwise(head_bounds(num_heads, num_kv_heads, degree=exchange.group.size)):
        sent = -(-end // group_size) - start // group_size if end > start else 0
        heads.append((end - start, sent, sent if sent < 2 or end - start == sent * group_size else end - start))
    return heads


def _trades(
    exchange: UlyssesShards, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> list[Exchange]:
    """The all-to-alls of :func:`ulysses_attention`: of queries, keys and values, then of outputs."""
    heads, rank = _heads(exchange, num_heads, num_kv_heads), exchange.group.rank
    widths = [(queries + 2 * sent) * head_size for queries, sent, _ in heads]
    mine, own_queries = exchange.sizes[rank], heads[rank][0]
    return [
        Exchange(
            group=exchange.group, dtype=dtype,
            send=[mine * width for width in widths], receive=[size * widths[rank] for size in exchange.sizes],
        ),
        Exchange(
            group=exchange.group, dtype=dtype, send=[size * own_queries * head_size for size in exchange.sizes],
            receive=[mine * queries * head_size for queries, _, _ in heads],
        ),
    ]  # fmt: skip
