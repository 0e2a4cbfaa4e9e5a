"""The packs that a profile measures: enough to separate what costs of l^2, l and 1."""

from collections.abc import Sequence

SHORTEST = 32
"""Tokens of the shortest sequence measured."""


def ladder(max_length: int, max_tokens: int) -> list[tuple[int, ...]]:
    """The packs to measure: single sequences of doubling lengths, and full packs of equal ones, each length fourfold.

    Together they separate l^2, l and 1: a pack of short sequences has as many tokens as one of long ones.
    """
    lengths = [max_length]
    while lengths[-1] > SHORTEST:
        lengths.append(max(SHORTEST, lengths[-1] // 2))
    return packs_of(lengths, max_tokens)


def packs_of(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Single sequences of ``lengths``, and full packs of every second of them from the longest, and of that."""
    lengths = sorted(set(lengths))
    full = [*reversed(lengths[-2::-2]), lengths[-1]]
    packs = [(length,) * (max_tokens // length) for length in full if max_tokens // length > 1]
    return list(dict.fromkeys([*((length,) for length in lengths), *packs]))
