"""Which ranks of a stage hold the tokens of each sequence of a micro-batch. Pure integers."""

from collections.abc import Sequence
from typing import NamedTuple

from lengthwise.core.errors import InputError


class Piece(NamedTuple):
    """Consecutive tokens of a sequence on one rank."""

    rank: int
    """Its place among the ranks of the stage."""
    num_tokens: int


Placement = tuple[tuple[Piece, ...], ...]
"""For each sequence of a pack its pieces in order, or none where all ranks of the stage share it in equal parts."""


def share_size(num_tokens: int, place: int, degree: int) -> int:
    """Tokens of the rank at ``place`` where all ranks of a stage share sequences of so many tokens in equal parts.

    Shares differ by one at most, the first ones have more.
    """
    num_per_rank, more = divmod(num_tokens, degree)
    return num_per_rank + (place < more)


def share_sizes(lengths: Sequence[int], placement: Placement, degree: int) -> list[int]:
    """Tokens that each rank of a stage holds of a pack; an empty placement: all share every sequence."""
    num_shared = sum(length for length, pieces in zip(lengths, placement) if not pieces) if placement else sum(lengths)
    sizes = [share_size(num_shared, place, degree) for place in range(degree)]
    for pieces in placement:
        for piece in pieces:
            sizes[piece.rank] += piece.num_tokens
    return sizes


def check_placement(lengths: Sequence[int], placement: Placement, degree: int) -> None:
    """Raise ``InputError`` unless the pieces of every sequence have its tokens, on ranks of the stage."""
    if len(placement) != len(lengths):
        raise InputError(
            f"the placement of a micro-batch is of {len(placement)} sequences, its pack has {len(lengths)}"
        )
    for number, (length, pieces) in enumerate(zip(lengths, placement)):
        if pieces and sum(piece.num_tokens for piece in pieces) != length:
            num_placed = sum(piece.num_tokens for piece in pieces)
            raise InputError(
                f"the pieces of sequence {number} of a micro-batch have {num_placed:,} tokens in all, it has {length:,}"
            )
        if outside := [piece.rank for piece in pieces if not 0 <= piece.rank < degree]:
            raise InputError(
                f"sequence {number} of a micro-batch has tokens on rank {outside[0]} of a stage of {degree} ranks, "
                f"which count from 0 to {degree - 1}"
            )
