"""Propagation layout: the weights that forward and backward use on each rank, and how they get there and back.

Every rank holds some intervals of the flat parameter buffer. *Pull* brings them from their owners, *push* returns
gradients, summed over all that hold the same. Where every rank holds everything these are an all-gather and a
reduce-scatter, else all-to-alls of the slices that :func:`lengthwise.core.layout.transfers` counts.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.core.layout import Interval, Layout, Transfer, fully_sharded, shard_size, transfers
from lengthwise.runtime.comm.collectives import all_gather, reduce_scatter
from lengthwise.runtime.comm.world import World


class Propagation(Protocol):
    """Weights in the compute dtype and gradients in the master dtype, as one rank holds them."""

    weights: Tensor
    """Flat; what this rank computes with."""
    gradients: Tensor
    """Flat; where gradients accumulate."""

    def place(self, interval: Interval) -> slice:
        """Where in ``weights`` and ``gradients`` an interval of the whole buffer is."""
        ...

    def pull(self, own: Tensor) -> None:
        """Fill ``weights`` from every owner's shard ``own``, padded to equal size, in the compute dtype."""
        ...

    def push(self, own: Tensor) -> None:
        """Sum ``gradients`` into every owner's ``own``, and clear them."""
        ...


class WholePropagation:
    """Every rank holds everything. One collective each way."""

    def __init__(self, num_elements: int, world: World, *, compute: torch.dtype, master: torch.dtype) -> None:
        size = shard_size(num_elements, world.size)
        self.weights = torch.zeros(size * world.size, dtype=compute, device=world.device)
        self.gradients = torch.zeros(size * world.size, dtype=master, device=world.device)

    def place(self, interval: Interval) -> slice:
        """As it is."""
        return slice(*interval)

    def pull(self, own: Tensor) -> None:
        """One all-gather of all elements."""
        all_gather(self.weights, own)

    def push(self, own: Tensor) -> None:
        """One reduce-scatter of all elements."""
        reduce_scatter(own, self.gradients)
        self.gradients.zero_()


class SlicedPropagation:
    """Every rank holds the intervals of ``layout``. One all-to-all each way."""

    def __init__(self, layout: Layout, world: World, *, compute: torch.dtype, master: torch.dtype) -> None:
        self._held = layout.intervals[world.rank]
        self._starts: dict[int, int] = {}
        num_held = 0
        for start, end in self._held:
            self._starts[start] = num_held
            num_held += end - start
        self.weights = torch.zeros(num_held, dtype=compute, device=world.device)
        self.gradients = torch.zeros(num_held, dtype=master, device=world.device)
        moves = transfers(fully_sharded(layout.num_elements, world.size), layout)
        first = world.rank * shard_size(layout.num_elements, world.size)
        # Of each peer, in its order: the slices of our shard that it holds, and of what we hold that it owns.
        self._to = [self._slices([m for m in moves if m.source == world.rank and m.target == rank], first)
                    for rank in range(world.size)]  # fmt: skip
        self._from = [[self.place((m.start, m.end)) for m in moves if m.target == world.rank and m.source == rank]
                      for rank in range(world.size)]  # fmt: skip

    def place(self, interval: Interval) -> slice:
        """Found by the held interval that contains it."""
        start, end = interval
        around = max((low for low, _ in self._held if low <= start), default=None)
        assert around is not None, f"interval [{start}, {end}) is not held here"
        at = self._starts[around] + start - around
        return slice(at, at + end - start)

    def pull(self, own: Tensor) -> None:
        """Owners send every holder the slices it holds."""
        received = _exchange([own[at] for group in self._to for at in group], _sizes(self._to), _sizes(self._from), own)
        for at, piece in zip(_flat(self._from), received.split([at.stop - at.start for at in _flat(self._from)])):
            self.weights[at] = piece

    def push(self, own: Tensor) -> None:
        """Holders send every owner their gradients of its slices; owners add them up, rank by rank."""
        pieces = [self.gradients[at] for at in _flat(self._from)]
        received = _exchange(pieces, _sizes(self._from), _sizes(self._to), self.gradients)
        own.zero_()
        for at, piece in zip(_flat(self._to), received.split([at.stop - at.start for at in _flat(self._to)])):
            own[at] += piece
        self.gradients.zero_()

    @staticmethod
    def _slices(moves: Sequence[Transfer], first: int) -> list[slice]:
        return [slice(move.start - first, move.end - first) for move in moves]


def _flat(groups: Sequence[Sequence[slice]]) -> list[slice]:
    return [at for group in groups for at in group]


def _sizes(groups: Sequence[Sequence[slice]]) -> list[int]:
    return [sum(at.stop - at.start for at in group) for group in groups]


def _exchange(pieces: Sequence[Tensor], send: list[int], receive: list[int], like: Tensor) -> Tensor:
    out = like.new_empty(sum(receive))
    dist.all_to_all_single(out, torch.cat([like.new_empty(0), *pieces]), receive, send)
    return out
