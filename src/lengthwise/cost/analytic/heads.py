"""How the ranks of a stage share the heads of attention."""

from dataclasses import dataclass
from itertools import pairwise

from lengthwise.core.head_split import head_bounds


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """How p ranks share the heads, in consecutive runs."""

    num_heads: int
    """Query heads of the busiest rank."""
    num_kv_heads: int
    """Key/value heads of the rank that needs the most."""
    num_kv_copies: int
    """Key/value heads summed over ranks: K, and more where query heads that share one sit on several ranks."""


def split_heads(num_heads: int, num_kv_heads: int, *, degree: int) -> HeadSplit:
    """Split heads by whole key/value groups if all ranks get one, else by query heads, copying shared keys and values.

    Where p does not divide, some ranks hold one more, and all wait for them: ceil(N / p) instead of N / p.
    """
    group = num_heads // num_kv_heads
    bounds = head_bounds(num_heads, num_kv_heads, degree=degree)
    heads_of_rank = [(end - start, -(-end // group) - start // group) for start, end in pairwise(bounds) if end > start]
    return HeadSplit(
        num_heads=max(count for count, _ in heads_of_rank),
        num_kv_heads=max(shared for _, shared in heads_of_rank),
        num_kv_copies=sum(shared for _, shared in heads_of_rank),
    )
