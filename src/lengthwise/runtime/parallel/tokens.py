"""Which tokens of a pack each of p ranks holds between operators. Pure integers.

Every method takes and returns this share, so any layer may use any method. Each sequence is cut into chunks: under a
causal mask 2 p, of which rank r takes number r and number 2 p - 1 - r, so that every rank has as many pairs of tokens
to attend (zigzag, as in Llama 3's context parallelism; Grattafiori et al. 2024); without a mask p. Tokens that do not
divide are dealt to the ranks in turn, so ranks differ by one token at most, whatever the lengths.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.runtime.models.attention_view import AttentionView


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShards:
    """Assignment of a pack's tokens to ranks: the places in the pack of every rank's tokens."""

    places: tuple[np.ndarray, ...]
    """For each rank, ascending."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(len(places) for places in self.places)

    @cached_property
    def by_rank(self) -> np.ndarray:
        """[T] places in the pack of all tokens, rank by rank: the order in which they are gathered."""
        return np.concatenate(self.places)

    def into(self, view: AttentionView) -> np.ndarray | None:
        """[T] index that puts gathered tokens into the order of ``view``; None where they are in it already."""
        gathered = np.empty(view.num_tokens, dtype=np.int64)
        gathered[self.by_rank] = np.arange(view.num_tokens)
        index = gathered if view.order is None else gathered[view.order]
        return None if np.array_equal(index, np.arange(len(index))) else index


def shard_tokens(cu_seqlens: tuple[int, ...], *, degree: int, causal: bool) -> TokenShards:
    """The shares of ``degree`` ranks in a pack with sequence boundaries ``cu_seqlens``."""
    if degree == 1:
        return TokenShards(places=(np.arange(cu_seqlens[-1]),))
    rank_of_chunk = np.array([*range(degree), *reversed(range(degree))] if causal else range(degree))
    chunk_size, rest = np.divmod(np.diff(cu_seqlens), len(rank_of_chunk))
    # Left-over tokens are dealt in turn: rank r is so many ranks behind the one whose turn it is. Whoever is dealt a
    # second one of a sequence takes it in its second chunk.
    turn = (np.cumsum(rest) - rest) % degree
    behind = (rank_of_chunk[None, :] - turn[:, None]) % degree + degree * (np.arange(len(rank_of_chunk)) >= degree)
    sizes = chunk_size[:, None] + (behind < rest[:, None])
    rank_of_token = np.repeat(np.tile(rank_of_chunk, len(chunk_size)), sizes.ravel())
    return TokenShards(places=tuple(np.flatnonzero(rank_of_token == rank) for rank in range(degree)))
