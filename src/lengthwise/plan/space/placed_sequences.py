"""Which sequences of a pack one rank of a stage computes alone, so that nobody else needs their keys and values.

Under rings and gathered keys, ranks need of each other the sequences that they share. Long ones are worth it: attention
takes longer than their keys and values travel, and every rank has an equal part of both (zigzag). Short ones are whole
on one rank, dealt so that no rank has many more tokens or pairs to attend than the mean: the longest first, each to the
rank that has the least of either (LPT in two dimensions). Where one has too many tokens still, the end of a sequence
moves to ranks that have fewer (McNaughton 1959), and that sequence travels. Means are what no placement is below, so
how far a placement is from the best is known.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.token_placement import Piece, Placement, share_sizes
from lengthwise.plan.space.candidate import Candidate

LOCAL_METHODS = frozenset({Method.RING, Method.ALL_GATHER})
"""Methods under which ranks send nothing of sequences that one has whole, and which plans place."""
LOCAL_PART = 2
"""Sequences of at most one over so much of a rank's part of the largest micro-batch may be whole on one rank."""
MORE_TOKENS, MORE_PAIRS = 0.002, 0.02
"""How many more tokens, and pairs to attend, than the mean a rank may have."""
MOST_KEPT = 1 << 14
"""Packs whose placements are remembered."""


class PlacedPack(NamedTuple):
    """A placement of a pack's sequences, and how it is balanced."""

    placement: Placement
    """Empty: all ranks share all sequences in equal parts."""
    most_tokens: int
    """Of one rank."""
    of_mean_tokens: float
    """These over the mean."""
    of_mean_pairs: float
    """Most pairs to attend of a rank over their mean."""


def with_local_sequences(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates for packs whose short sequences are whole on one rank, for those under whose methods that pays."""
    return tuple(
        replace(candidate, longest_local=candidate.max_tokens // (LOCAL_PART * candidate.scheme.degree))
        for candidate in candidates
        if _can_place(candidate)
    )


def _can_place(candidate: Candidate) -> bool:
    if candidate.scheme.degree == 1 or not LOCAL_METHODS.issuperset(candidate.scheme.methods):
        return False
    try:
        candidate.local_times_s(np.ones(1, dtype=np.int64))
    except InputError:
        return False  # no costs of what one device computes: a profile knows what was profiled
    return True


@lru_cache(maxsize=MOST_KEPT)
def place_sequences(lengths: tuple[int, ...], *, degree: int, longest: int, most_tokens: int) -> PlacedPack:
    """Place as many of a pack's sequences whole on single ranks as balance allows, the shortest first.

    Tokens see those before them alone.

    Args:
        lengths: of the sequences.
        degree: ranks of the stage.
        longest: tokens of a sequence that may be on one rank.
        most_tokens: of a micro-batch that ranks in equal parts hold.
    """
    order, ordered = np.argsort(-np.asarray(lengths), kind="stable"), np.sort(lengths)[::-1]
    pairs = ordered * (ordered + 1) / 2
    mean_tokens, mean_pairs = ordered.sum() / degree, pairs.sum() / degree
    limit = int(min((1 + MORE_TOKENS) * mean_tokens, max(most_tokens / degree, np.ceil(mean_tokens))))
    may_be_whole = (ordered <= min(longest, limit)) & (pairs <= (1 + MORE_PAIRS) * mean_pairs)
    num_shared = int(len(ordered) - may_be_whole.sum())
    tried = 1
    while num_shared < len(ordered):
        ranks = _dealt(ordered, pairs, num_shared, degree, (mean_tokens, mean_pairs))
        placement = _within(ordered.tolist(), ranks, limit, degree)
        most_pairs = max(_pairs_of_ranks(ordered.tolist(), placement, degree)) / mean_pairs
        if most_pairs <= 1 + MORE_PAIRS:
            in_order: list[tuple[Piece, ...]] = [()] * len(order)
            for place, pieces in zip(order.tolist(), placement):
                in_order[place] = pieces
            largest = max(share_sizes(ordered.tolist(), placement, degree))
            return PlacedPack(tuple(in_order), largest, float(largest / mean_tokens), float(most_pairs))
        num_shared, tried = num_shared + tried, 2 * tried
    return PlacedPack((), int(np.ceil(mean_tokens)), 1.0, 1.0)


def _dealt(
    lengths: np.ndarray, pairs: np.ndarray, num_shared: int, degree: int, means: tuple[float, float]
) -> list[int]:
    """The rank of each sequence, the longest first, but for the first ``num_shared``: -1, all ranks share them."""
    shared = [float(of[:num_shared].sum() / degree / mean) for of, mean in zip((lengths, pairs), means)]
    loads = [(max(shared), rank, shared[0], shared[1]) for rank in range(degree)]
    ranks = [-1] * num_shared
    for tokens, to_attend in (np.stack([lengths, pairs])[:, num_shared:] / np.array(means)[:, None]).T.tolist():
        _, rank, with_tokens, with_pairs = loads[0]
        load = with_tokens + tokens, with_pairs + to_attend
        heapreplace(loads, (max(load), rank, *load))
        ranks.append(rank)
    return ranks


def _within(lengths: Sequence[int], ranks: Sequence[int], limit: int, degree: int) -> Placement:
    """The placement of sequences on ranks, with the ends of some moved where a rank has more than ``limit`` tokens."""
    pieces: list[tuple[Piece, ...]] = [
        (Piece(rank, length),) if rank >= 0 else () for rank, length in zip(ranks, lengths)
    ]
    sizes = share_sizes(lengths, tuple(pieces), degree)
    mean, on_rank = -(-sum(lengths) // degree), [list[int]() for _ in range(degree)]
    for number, rank in enumerate(ranks):
        if rank >= 0:
            on_rank[rank].append(number)
    for rank, numbers in enumerate(on_rank):
        while sizes[rank] > limit and numbers:
            excess = sizes[rank] - mean
            number = next((n for n in reversed(numbers) if lengths[n] > excess), numbers[0])
            numbers.remove(number)
            moved = min(excess, lengths[number])
            parts = [Piece(rank, lengths[number] - moved)] if moved < lengths[number] else []
            while moved:
                other = min(range(degree), key=sizes.__getitem__)
                part = min(moved, max(1, mean - sizes[other]))
                parts.append(Piece(other, part))
                sizes[rank], sizes[other], moved = sizes[rank] - part, sizes[other] + part, moved - part
            pieces[number] = tuple(parts)
    return tuple(pieces)


def _pairs_of_ranks(lengths: Sequence[int], placement: Placement, degree: int) -> list[float]:
    """Pairs to attend of each rank; shared sequences are in equal parts."""
    pairs = [sum(n * (n + 1) / 2 for n, pieces in zip(lengths, placement) if not pieces) / degree] * degree
    for pieces in placement:
        before = 0
        for rank, size in pieces:
            pairs[rank] += size * before + size * (size + 1) / 2
            before += size
    return pairs
