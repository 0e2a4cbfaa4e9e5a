"""Token orders for attention over a pack, and where sequences end in each. Pure integers.

Most models attend in the pack's own order. One that attends along several axes of its sequences has a view per axis:
the same tokens, other neighbours.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lengthwise.core.errors import InputError, Setting
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.core.specs import ModelSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionView:
    """One order of a pack's tokens, cut into the sequences that attention never leaves."""

    cu_seqlens: tuple[int, ...]
    """Offsets of the boundaries in this order, from 0 to T."""
    causal: bool
    """No token sees a later one of this order."""
    order: np.ndarray | None = None
    """[T] where in the pack each token of this order is; None: the pack's own order."""
    tree: PrefixTree | None = None
    """Where sequences share what they begin with: the segments between ``cu_seqlens``, each of which also sees all of
    those that it continues. In the pack's own order alone."""
    num_before: int = 0
    """Tokens of the first sequence that are computed before these, of a slice of a pack."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the pack, T."""
        return self.cu_seqlens[-1]

    @cached_property
    def places(self) -> np.ndarray:
        """Place in this order of each token of the pack, [T]."""
        if self.order is None:
            return np.arange(self.num_tokens)
        places = np.empty(self.num_tokens, dtype=np.int64)
        places[self.order] = np.arange(self.num_tokens)
        return places

    @cached_property
    def offsets(self) -> np.ndarray:
        """Position within its sequence of each token of the pack, [T]."""
        if self.tree is not None:
            return self.tree.positions
        starts = np.repeat(self.cu_seqlens[:-1], [end - start for start, end in pairwise(self.cu_seqlens)])
        offsets = np.arange(self.num_tokens) - starts
        offsets[: self.cu_seqlens[1]] += self.num_before
        return offsets[self.places]


def in_order(cu_seqlens: tuple[int, ...], *, causal: bool, tree: PrefixTree | None = None) -> AttentionView:
    """View in the pack's own order; ``tree``: of its sequences, where they share what they begin with."""
    return AttentionView(cu_seqlens=cu_seqlens if tree is None else tree.bounds, causal=causal, tree=tree)


def check_positions(cu_seqlens: tuple[int, ...], spec: ModelSpec) -> None:
    """Raise ``InputError`` if a sequence is longer than the model has learned positions."""
    longest = max(end - start for start, end in pairwise(cu_seqlens))
    if longest > spec.max_positions:
        raise InputError(
            f"a sequence has {longest:,} tokens, model {spec.name} has learned positions for {spec.max_positions:,}; "
            f"set {Setting.MAX_LENGTH}={spec.max_positions}"
        )


def within_frames(cu_seqlens: tuple[int, ...], *, frame_size: int) -> AttentionView:
    """View of each sequence cut into frames of ``frame_size`` tokens, the last one with what is left."""
    cuts = [cut for start, end in pairwise(cu_seqlens) for cut in range(start, end, frame_size)]
    return AttentionView(cu_seqlens=(*cuts, cu_seqlens[-1]), causal=False)


def across_frames(cu_seqlens: tuple[int, ...], *, frame_size: int) -> AttentionView:
    """View across frames: the tokens at one place of every frame of a sequence, then those at the next place."""
    order, lengths = [], []
    for start, end in pairwise(cu_seqlens):
        place = np.arange(end - start) % frame_size
        order.append(start + np.argsort(place, kind="stable"))
        lengths.append(np.bincount(place))
    cuts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return AttentionView(cu_seqlens=tuple(cuts.tolist()), causal=False, order=np.concatenate(order))
