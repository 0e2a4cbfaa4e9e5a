"""The parameters of one unit that one collective gathers, and their buffers on this rank."""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from lengthwise.core.layout import shard_size
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.state.absent_parameter import make_present
from lengthwise.runtime.state.propagation import UnitRoute
from lengthwise.runtime.state.sharded_weights import ShardedWeights
from lengthwise.runtime.state.table import ParameterSlot


@dataclass(eq=False, kw_only=True)
class GatheredPart:
    """The trained parameters of a unit, or its frozen ones of one dtype."""

    shares: ShardedWeights
    unit: int
    slots: tuple[ParameterSlot, ...]
    route: UnitRoute | None = None
    """In this round."""
    weights: Tensor | None = None
    """Flat; without storage while the unit is not gathered, so that what autograd saved of it is freed as well."""
    num_bytes: int = 0
    """The size of the storage of ``weights`` while they are there."""
    pull: AsyncResult | None = None
    """The gather under way."""
    casts: dict[str, Tensor] = field(default_factory=dict)
    """The parameters of a less precise dtype than ``weights``; without storage at the same times."""
    is_cast: bool = True
    """Whether parameters are gathered in their own dtypes."""
    gradients: Tensor | None = None
    """What the backward of this round added; None before."""

    def share_in(self, dtype: torch.dtype | None) -> Tensor:
        """What this rank has of the part, as values of the parameters' dtype, in ``dtype``; None: the same."""
        assert self.route is not None
        share = self.shares.share(self.route.own_share)
        return share if dtype is None else share.to(dtype)

    def start_pull(self, dtype: torch.dtype | None) -> None:
        """Start to gather the part."""
        assert self.route is not None
        share, self.is_cast = self.share_in(dtype), dtype is None
        if self.weights is None:
            bounds, num_ranks = self.shares.table.bounds, self.shares.world.size
            size = shard_size(bounds[self.unit + 1] - bounds[self.unit], num_ranks) * num_ranks
            self.weights = share.new_empty(size)
            self.num_bytes = self.weights.untyped_storage().nbytes()
        self.weights.untyped_storage().resize_(self.num_bytes)
        self.pull = self.route.pull(share, self.weights)

    def attach(self) -> None:
        """Wait for the part, and let its parameters be views of what was gathered."""
        if self.pull is None:
            return
        self.pull.wait()
        self.pull = None
        assert self.weights is not None
        for slot in self.slots:
            make_present(self.shares.named[slot.name]).data = self._values(slot, self.view(self.weights, slot))

    def _values(self, slot: ParameterSlot, place: Tensor) -> Tensor:
        """A parameter's values, of those at its place."""
        if not self.is_cast or slot.name not in self.shares.narrow.dtypes:
            return place
        if slot.name not in self.casts:
            self.casts[slot.name] = torch.empty_like(place, dtype=self.shares.dtype_of(slot.name))
        cast = self.casts[slot.name]
        cast.untyped_storage().resize_(place.numel() * cast.element_size())
        return cast.copy_(place)

    def free(self) -> None:
        """Free the storage of what was gathered, which comes back with the next pull."""
        for tensor in (self.weights, *self.casts.values()):
            if tensor is not None:
                tensor.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Let what was gathered go when nobody refers to it any more."""
        self.weights = None
        self.casts.clear()

    def view(self, flat: Tensor, slot: ParameterSlot) -> Tensor:
        """The place of a parameter in what is laid out as the part."""
        start = slot.start - self.shares.table.bounds[self.unit]
        return flat[start : start + prod(slot.shape)].view(slot.shape)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """Zeros that are laid out as the part."""
        assert self.route is not None
        return torch.zeros(self.route.region.stop, dtype=dtype, device=self.shares.world.device)

    def joined(self, gradients: list[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The gradients of the part end to end, from those of its parameters, which are freed one by one."""
        assert self.route is not None
        only = gradients[0] if len(gradients) == 1 else None
        if only is not None and only.numel() == self.route.region.stop and only.is_contiguous():
            return only.view(-1)
        flat = self.zeros(dtype)
        for slot in self.slots:
            gradient = gradients.pop(0)
            if gradient is not None:
                self.view(flat, slot).copy_(gradient)
        return flat


def parts_of(shares: ShardedWeights) -> list[GatheredPart]:
    """The parts of all units that have any of these weights."""
    slots: dict[int, list[ParameterSlot]] = {}
    for slot in shares.table.slots.values():
        if prod(slot.shape):
            slots.setdefault(slot.unit, []).append(slot)
    return [GatheredPart(shares=shares, unit=unit, slots=tuple(of_unit)) for unit, of_unit in slots.items()]
