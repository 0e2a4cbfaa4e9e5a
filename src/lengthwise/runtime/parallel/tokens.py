"""Which tokens of a pack each of p ranks holds between operators. Pure integers.

Every method takes and returns this share, so any layer may use any method. Each sequence is cut into chunks: under a
causal mask 2 p, of which rank r takes number r and number 2 p - 1 - r, so that every rank has as many pairs of tokens
to attend (zigzag, as in Llama 3's context parallelism; Grattafiori et al. 2024); without a mask p. Tokens that do not
divide are dealt to the ranks in turn, so ranks differ by one token at most, whatever the lengths. A plan may place
sequences otherwise: whole on one rank, or in pieces on some.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lengthwise.core.token_placement import Placement
from lengthwise.runtime.models.attention_view import AttentionView


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Neighbouring tokens of a sequence that one rank holds."""

    sequence: int
    """The number of the sequence in the pack."""
    first: int
    """The row of the first one among all tokens of the rank."""
    positions: range
    """Their positions in the sequence."""

    def after(self, start: int) -> "TokenRun":
        """The run with its positions counted from ``start`` on."""
        return replace(self, positions=range(self.positions.start + start, self.positions.stop + start))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShards:
    """Assignment of a pack's tokens to ranks: the places in the pack of every rank's tokens."""

    places: tuple[np.ndarray, ...]
    """For each rank, ascending."""
    is_placed: bool = False
    """Whether a plan says which ranks hold which tokens of some sequences."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(len(places) for places in self.places)

    @cached_property
    def by_rank(self) -> np.ndarray:
        """[T] places in the pack of all tokens, rank by rank: the order in which they are gathered."""
        return np.concatenate(self.places)

    def merged(self, size: int) -> "TokenShards":
        """The shares of each ``size`` neighbouring ranks together."""
        firsts = range(0, len(self.places), size)
        places = tuple(np.sort(np.concatenate(self.places[first : first + size])) for first in firsts)
        return TokenShards(places=places, is_placed=self.is_placed)

    def runs(self, cu_seqlens: tuple[int, ...], rank: int) -> list[TokenRun]:
        """The tokens of ``rank`` as runs, two at most in each sequence that all ranks share."""
        places, bounds = self.places[rank], np.asarray(cu_seqlens)
        sequences = np.searchsorted(bounds, places, side="right") - 1
        begins = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(sequences, prepend=-1) != 0)).tolist()
        offsets = places - bounds[sequences]
        return [
            TokenRun(
                sequence=int(sequences[first]), first=first,
                positions=range(int(offsets[first]), int(offsets[first]) + end - first),
            )
            for first, end in zip(begins, [*begins[1:], len(places)])
        ]  # fmt: skip

    def into(self, view: AttentionView) -> np.ndarray | None:
        """[T] index that puts gathered tokens into the order of ``view``; None where they are in it already."""
        gathered = np.empty(view.num_tokens, dtype=np.int64)
        gathered[self.by_rank] = np.arange(view.num_tokens)
        index = gathered if view.order is None else gathered[view.order]
        return None if np.array_equal(index, np.arange(len(index))) else index


def shard_tokens(cu_seqlens: tuple[int, ...], *, degree: int, causal: bool, placement: Placement = ()) -> TokenShards:
    """The shares of ``degree`` ranks in a pack with sequence boundaries ``cu_seqlens``.

    ``placement``: of sequences that not all ranks share in equal parts.
    """
    if degree == 1:
        return TokenShards(places=(np.arange(cu_seqlens[-1]),))
    lengths = np.diff(cu_seqlens)
    if not placement:
        rank_of_token = _zigzag(lengths, degree=degree, causal=causal)
    else:
        is_shared = np.repeat([not pieces for pieces in placement], lengths)
        rank_of_token = np.empty(cu_seqlens[-1], dtype=np.int64)
        rank_of_token[is_shared] = _zigzag(lengths[[not pieces for pieces in placement]], degree=degree, causal=causal)
        pieces = [piece for pieces in placement for piece in pieces]
        rank_of_token[~is_shared] = np.repeat([p.rank for p in pieces], [p.num_tokens for p in pieces])
    places = tuple(np.flatnonzero(rank_of_token == rank) for rank in range(degree))
    return TokenShards(places=places, is_placed=bool(placement))


def _zigzag(lengths: np.ndarray, *, degree: int, causal: bool) -> np.ndarray:
    """The rank of each token of sequences of these lengths, one after another, that all ranks share in equal parts."""
    rank_of_chunk = np.array([*range(degree), *reversed(range(degree))] if causal else range(degree))
    chunk_size, rest = np.divmod(lengths, len(rank_of_chunk))
    # Left-over tokens are dealt in turn: rank r is so many ranks behind the one whose turn it is. Whoever is dealt a
    # second one of a sequence takes it in its second chunk.
    turn = (np.cumsum(rest) - rest) % degree
    behind = (rank_of_chunk[None, :] - turn[:, None]) % degree + degree * (np.arange(len(rank_of_chunk)) >= degree)
    sizes = chunk_size[:, None] + (behind < rest[:, None])
    ranks: np.ndarray = np.repeat(np.tile(rank_of_chunk, len(chunk_size)), sizes.ravel())
    return ranks
