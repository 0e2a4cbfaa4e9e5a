"""A few sizes for many lengths: which ones leave the least padding, found exactly.

What is compiled for one shape runs for that shape alone, so that a run wants few of them; and whatever is smaller than
its shape is filled up with padding. A lattice is at most K sizes, each item going to the smallest that holds it. Of all
lattices the one with the least padding is found by dynamic programming over the distinct sizes ``r_1 < ... < r_n`` that
items can be rounded up to, with ``C_j`` items of at most ``r_j``:

    D_k(j) = min over i < j of D_(k-1)(i) + r_j (C_j - C_i)

is the least number of tokens that k sizes, the largest ``r_j``, lay the items up to ``r_j`` out in. The last term
satisfies the quadrangle inequality, so that the best i grows with j and each of the K rounds takes O(n log n) by divide
and conquer, a whole level of it at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.errors import InputError

MULTIPLE = 64
"""Sizes are multiples of this: kernels compute in tiles, and what does not divide is padded inside them."""


@dataclass(frozen=True, kw_only=True)
class SizeBuckets:
    """Sizes that items are filled up to, and what that costs the items it was made for."""

    sizes: tuple[int, ...]
    """Ascending, in tokens: of packs, or lengths that sequences are padded to."""
    num_tokens: int
    """Of the items, without padding."""
    num_padding: int
    """Tokens of padding that fill every item up to its size."""
    budget: int | None = None
    """Most tokens of a padded batch, where sizes are lengths of rows."""

    @property
    def waste(self) -> float:
        """Share of the computed tokens that is padding."""
        return self.num_padding / (self.num_tokens + self.num_padding)

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, length) of padded batches, the longest rows last; packs are one row."""
        return tuple((self.budget // size if self.budget else 1, size) for size in self.sizes)

    def size_of(self, num_tokens: int) -> int:
        """The smallest size that holds ``num_tokens``.

        Raises:
            InputError: none does.
        """
        index = int(np.searchsorted(self.sizes, num_tokens))
        if index == len(self.sizes):
            raise InputError(
                f"{num_tokens:,} tokens are more than the largest of the {index} sizes holds, {self.sizes[-1]:,}; "
                "make the sizes from lengths that have the longest, or with a higher limit"
            )
        return self.sizes[index]


def packed_lattice(num_tokens: ArrayLike, *, most: int, multiple_of: int = MULTIPLE, largest: int = 0) -> SizeBuckets:
    """The at most ``most`` sizes of packs that leave the least padding; a size more never leaves more.

    Args:
        num_tokens: of every pack of a typical run, in any order.
        most: sizes at most.
        multiple_of: what every size is a multiple of.
        largest: tokens that the largest size holds at least, whether or not some pack has as many.

    Raises:
        InputError: no pack, or a number below 1.
    """
    tokens = np.asarray(num_tokens, dtype=np.int64).ravel()
    if most < 1 or multiple_of < 1 or not len(tokens) or tokens.min() < 1:
        raise InputError(
            f"sizes need at least one item of at least 1 token, most of at least 1 (now {most}) and multiple_of of at "
            f"least 1 (now {multiple_of}); there are {len(tokens):,} items"
        )
    distinct, counts = np.unique(-(-tokens // multiple_of) * multiple_of, return_counts=True)
    top = -(-largest // multiple_of) * multiple_of
    if top > distinct[-1]:
        distinct, counts = np.append(distinct, top), np.append(counts, 0)
    sizes, computed = least_padding(distinct, counts, most=most)
    total = int(tokens.sum())
    return SizeBuckets(sizes=tuple(sizes.tolist()), num_tokens=total, num_padding=computed - total)


def padded_lattice(lengths: ArrayLike, *, most: int, budget: int, multiple_of: int = MULTIPLE) -> SizeBuckets:
    """The at most ``most`` lengths of rows that leave the least padding: batches of ``budget // length`` rows each.

    Rows of padding alone, which only the last batch of a length can have, are not counted.

    Args:
        lengths: of every sequence, in tokens, in any order.
        most: shapes at most.
        budget: most tokens of a batch, padding included.
        multiple_of: what every length of rows is a multiple of.

    Raises:
        InputError: no sequence, or the longest one's row exceeds the budget.
    """
    lattice = packed_lattice(lengths, most=most, multiple_of=multiple_of)
    if lattice.sizes[-1] > budget:
        raise InputError(
            f"the longest sequence is padded to {lattice.sizes[-1]:,} tokens, a batch holds {budget:,}; raise the "
            "budget or cut longer sequences"
        )
    return SizeBuckets(
        sizes=lattice.sizes, num_tokens=lattice.num_tokens, num_padding=lattice.num_padding, budget=budget
    )


def least_padding(sizes: np.ndarray, counts: np.ndarray, *, most: int) -> tuple[np.ndarray, int]:
    """Choose the ``sizes`` to pad to, the largest among them; also how many tokens are computed then.

    Args:
        sizes: [n] ascending, distinct.
        counts: [n] items of each, filled up to it or to a larger one.
        most: how many may be chosen.
    """
    below = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    sizes = np.asarray(sizes, dtype=np.int64)
    computed = sizes * below[1:]
    before: list[np.ndarray] = []
    for _ in range(min(most, len(sizes)) - 1):
        # With a size more, the last one may begin behind any other; beginning at 0 is to use one size less.
        computed, best = _one_more(np.concatenate([[0], computed]), sizes, below)
        before.append(best)
    chosen, index = [], len(sizes)
    for best in reversed(before):
        if index:
            chosen.append(index - 1)
            index = int(best[index - 1])
    if index:
        chosen.append(index - 1)
    return sizes[np.array(chosen[::-1])], int(computed[-1])


def _one_more(base: np.ndarray, sizes: np.ndarray, below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every j the least ``base[i] + sizes[j] (below[j + 1] - below[i])`` over i <= j, and the i it is found at."""
    count = len(sizes)
    value, best = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    # Each j of a level halves a stretch of j, whose best i lie between those of the stretch's neighbours.
    first, last, low, high = (np.array([x]) for x in (0, count - 1, 0, count - 1))
    while len(first):
        middle = (first + last) // 2
        ends = np.minimum(high, middle)
        widths = ends - low + 1
        starts = np.cumsum(widths) - widths
        i = np.arange(int(widths.sum())) + np.repeat(low - starts, widths)
        costs = base[i] - np.repeat(sizes[middle], widths) * below[i]
        least = np.minimum.reduceat(costs, starts)
        hits = np.flatnonzero(costs == np.repeat(least, widths))
        argmins = i[hits[np.searchsorted(hits, starts)]]
        value[middle], best[middle] = least + sizes[middle] * below[middle + 1], argmins
        first, last = np.concatenate([first, middle + 1]), np.concatenate([middle - 1, last])
        low, high = np.concatenate([low, argmins]), np.concatenate([argmins, high])
        is_nonempty = first <= last
        first, last, low, high = first[is_nonempty], last[is_nonempty], low[is_nonempty], high[is_nonempty]
    return value, best


def round_down(limit: int, sizes: Sequence[int]) -> int:
    """The largest of ``sizes`` within ``limit``; 0 if none is."""
    return max((size for size in sizes if size <= limit), default=0)
