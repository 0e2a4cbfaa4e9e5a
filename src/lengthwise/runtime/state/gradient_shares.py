"""Gradients that the ranks of a stage reduce to shares, unit by unit, in every backward.

Ranks that share the tokens of a micro-batch and hold the same weights whole each make a part of every gradient. Kept
until the step ends, these are as many numbers as the weights. Where a plan shards gradients (ZeRO stage 2, arXiv
1910.02054, within a stage), a rank has those of the unit that its backward is at, and of one more, which is being
reduce-scattered: of all others its share, one of p equal ones, to which every micro-batch adds.

    whole      [p * share]  of a unit: what this rank's tokens give
    gradients  [held]       of every unit this rank's share, summed over the ranks of the stage and all micro-batches

The ranks of a stage come to the same units in the same order, so nobody waits for another stage or pipeline.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.core.layout import shard_size
from lengthwise.core.pipeline_config import GradientShare
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.state.propagation import Routes
from lengthwise.runtime.state.table import ParameterRows

GRADIENT_SHARES = "gradient shares"
"""The purpose of groups that reduce gradients: they never wait for what ranks exchange within layers."""


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """The gradients that this rank makes of a unit."""

    share: int
    """Elements of the largest share."""
    own_share: slice
    """Where this rank's is in ``gradients``."""
    places: dict[str, tuple[slice, tuple[int, ...]]]
    """Where each parameter is in the whole, and its shape."""


class GradientShares:
    """The whole gradients of the units that a backward is at, on their way to the shares that ranks keep."""

    def __init__(self, num_units: int) -> None:
        self._num_units, self._num_shares = num_units, 1
        self._units: dict[int, _Unit] = {}
        self._gradients = torch.empty(0)
        self._whole: dict[int, Tensor] = {}
        self._under_way: list[tuple[int, AsyncResult]] = []
        self._group: Group | None = None
        self._groups: list[Group] = []
        """Those that reduced gradients in this step, in order."""
        self._next = -1
        self._reduced: Collection[int] = ()
        """Units that the ranks reduce in this backward."""

    @property
    def is_active(self) -> bool:
        """Whether this rank keeps shares."""
        return bool(self._units)

    def lay_out(
        self, parts: Sequence[ParameterRows], share: GradientShare | None, routes: Routes, gradients: Tensor
    ) -> None:
        """Keep this share of the gradients of ``parts`` in ``gradients``, where ``routes`` has it; None: keep none."""
        self.clear()
        self._units, self._gradients = {}, gradients
        if share is None:
            return
        self._num_shares = share[1]
        places: dict[int, dict[str, tuple[slice, tuple[int, ...]]]] = {}
        sizes: dict[int, int] = {}
        for part in parts:
            unit, (start, end) = part.slot.unit, part.interval
            first = sizes.get(unit, 0)
            sizes[unit] = first + end - start
            places.setdefault(unit, {})[part.slot.name] = slice(first, sizes[unit]), part.shape
        self._units = {
            unit: _Unit(share=shard_size(size, share[1]), own_share=routes.units[unit].region, places=places[unit])
            for unit, size in sizes.items()
            if size
        }

    def has(self, name: str, unit: int) -> bool:
        """Whether this rank keeps a share of the gradients of a parameter of ``unit``."""
        return unit in self._units and name in self._units[unit].places

    def add(self, name: str, unit: int, gradient: Tensor) -> None:
        """Add the gradient of a parameter that a backward has made."""
        if unit not in self._whole:
            self._whole[unit] = self._zeros(unit)
        place, shape = self._units[unit].places[name]
        self._whole[unit][place].view(shape).add_(gradient)

    def begin(self, group: Group, units: Collection[int] | None = None) -> None:
        """Begin a backward, whose gradients the ranks of ``group`` reduce; ``units``: that it has any of, None: all.

        One that has begun goes on.
        """
        if not self.is_active or self._group is not None:
            return
        self._group, self._next = group, self._num_units - 1
        self._reduced = self._units.keys() if units is None else self._units.keys() & units
        if group not in self._groups:
            self._groups.append(group)

    def is_too_late(self, unit: int) -> bool:
        """Whether the gradients of ``unit`` that come now are not reduced in this backward, or none runs."""
        return self.is_active and (self._group is None or unit > self._next or unit not in self._reduced)

    def reduce_from(self, unit: int) -> None:
        """Begin to reduce ``unit`` and all after it, to which this rank adds no more in this backward."""
        while self._group is not None and self._next >= unit:
            if self._next in self._reduced:
                self._reduce(self._next, self._taken(self._next))
                while len(self._under_way) > 1:
                    self._under_way.pop(0)[1].wait()
            self._next -= 1

    def settle(self, unit: int) -> None:
        """Wait until ``unit`` and all after it are reduced."""
        while self._under_way and self._under_way[0][0] >= unit:
            self._under_way.pop(0)[1].wait()

    def finish(self) -> None:
        """End a backward: reduce what is left, and wait for it."""
        self.reduce_from(0)
        self.settle(0)
        self._group = None

    def abandon(self) -> None:
        """Begin to reduce zeros for what is left of a backward that this rank does not compute; the step is void."""
        self._whole.clear()
        if self._group is None:
            return
        left = [unit for unit in range(self._next, -1, -1) if unit in self._reduced]
        zeros = self._gradients.new_zeros(max((self._units[unit].share for unit in left), default=0) * self._num_shares)
        for unit in left:
            self._reduce(unit, zeros[: self._units[unit].share * self._num_shares])
        self._next = -1

    def reduce_late(self) -> None:
        """Reduce what came after its unit was reduced; all ranks of the groups of this step call this."""
        for group in self._groups:
            self.begin(group)
            self.finish()

    def clear(self) -> None:
        """Forget what is not reduced, and begin a step."""
        self.settle(0)
        self._whole.clear()
        self._groups, self._group = [], None

    def _reduce(self, unit: int, whole: Tensor) -> None:
        assert self._group is not None, "a backward runs"
        size = self._units[unit].share
        reduced = self._group.reduce_scatter(whole, [size] * self._num_shares)
        own_share = self._gradients[self._units[unit].own_share]

        def make() -> Tensor:
            return own_share.add_(reduced.wait()[: len(own_share)])

        self._under_way.append((unit, AsyncResult(make)))

    def _taken(self, unit: int) -> Tensor:
        return self._whole.pop(unit) if unit in self._whole else self._zeros(unit)

    def _zeros(self, unit: int) -> Tensor:
        return self._gradients.new_zeros(self._units[unit].share * self._num_shares)
