"""Weights that are gathered for one layer at a time, and released when it has computed.

Between micro-batches a rank has its share of the weights only. A *round* is one micro-batch of every rank that still
has one: all ranks go through the same *moments*, the positions of the forward (before the layers, each layer, after
them) and then those of the backward, in reverse. When a rank reaches a moment, it leaves the units that are not used
any more, gathers those of the next moment, and waits for those of this one; a unit that is left in the backward sends
its gradients to their owners. Ranks without a micro-batch in a round send their shares and receive gradients, so ranks
may have different numbers of micro-batches. As in ZeRO stage 3 (arXiv 1910.02054), but for uneven accumulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.core.layout import shard_size
from lengthwise.core.pipeline_config import WeightShard
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.state.propagation import UnitRoute
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.table import ParameterSlot

Rounds = Sequence[tuple[bool, ...]]
"""For every round, whether each rank has a micro-batch in it."""


@dataclass(eq=False, kw_only=True)
class _Unit:
    """The buffers of a unit on this rank."""

    weights: Tensor
    """Flat; without storage while the unit is not gathered, so that what autograd saved of it is freed as well."""
    num_bytes: int
    pull: AsyncResult | None = None
    """The gather under way."""
    gradients: Tensor | None = None
    """What the backward of this round added; None before."""


class LayerGather:
    """Gathers, releases and reduces the units of a model as its forward and backward reach them."""

    def __init__(self, state: ShardedState, used: Sequence[frozenset[int]]) -> None:
        """``used``: the units whose parameters each position of the forward uses; position 0 is before the layers."""
        self._state, self._table = state, state.table
        bounds = self._table.bounds
        self._used = [frozenset(unit for unit in units if bounds[unit] < bounds[unit + 1]) for units in used]
        self._slots: dict[int, list[ParameterSlot]] = {unit: [] for unit in range(self._table.num_units)}
        for slot in self._table.slots.values():
            self._slots[slot.unit].append(slot)
        self._units: dict[int, _Unit] = {}
        self._resident: set[int] = set()
        self._moments: list[frozenset[int]] = [frozenset()]
        self._moment = 0
        self._rounds: Rounds = ()
        self._next_round = 0
        self._routes: tuple[UnitRoute, ...] = ()
        self._is_active = self._is_abandoned = False
        self._under_way: list[tuple[AsyncResult, Tensor]] = []

    def start(self, rounds: Rounds, *, num_kept: int = 0) -> None:
        """Begin a step of these rounds; every rank calls this.

        ``num_kept``: how many of the last layers, and the parameters after them, are gathered once for the whole step.
        """
        self.wait()
        state, num_layers = self._state, self._table.num_units - 2
        shard = WeightShard(first=num_layers - num_kept, end=num_layers, num_layers=num_layers) if num_kept else None
        kept_units = frozenset(range(num_layers - num_kept + 1, num_layers + 2)) if num_kept else frozenset()
        state.hold([shard] * state.world.size)
        for unit in set(self._slots) - kept_units:
            self._detach(unit)
        state.pull()
        state.finish_pull()
        forward = [units - kept_units for units in self._used]
        self._moments = [*forward, *reversed(forward), frozenset()]
        self._moment = len(self._moments) - 1
        self._rounds, self._next_round = rounds, 0

    @property
    def is_in_round(self) -> bool:
        """Whether this rank computes a micro-batch."""
        return self._is_active and self._moment < len(self._moments) - 1

    def begin_round(self, number: int) -> None:
        """Begin this rank's micro-batch of a round, after the rounds before it, in which it has none."""
        while self._next_round <= number:
            self.finish_round()
            self._begin()

    def reach_forward(self, position: int) -> None:
        """Gather what the forward uses at a position.

        Raises:
            InputError: the forward was there before.
        """
        if not self.is_in_round:
            return
        if position < self._moment:
            raise InputError(
                "the model was called twice in a micro-batch, or its layers in another order than they are listed, but "
                "its weights are gathered layer by layer; use weights='whole' in prepare(...)"
            )
        self._reach(position)

    def reach_backward(self, position: int) -> None:
        """Gather what the backward uses at a position; units that it is done with send their gradients."""
        if self.is_in_round:
            self._reach(len(self._moments) - 2 - position)

    def finish_round(self) -> None:
        """Go through what is left of the round."""
        self._reach(len(self._moments) - 1)

    def finish_rounds(self) -> None:
        """Go through what is left of the step, in which this rank has no micro-batch."""
        self.begin_round(len(self._rounds) - 1)
        self.finish_round()

    def abandon_round(self) -> None:
        """Take part in what is left of the round without computing; nothing is waited for.

        Ranks that share the micro-batch may wait for this one elsewhere, in an exchange of theirs.
        """
        self._is_abandoned = True
        self.finish_round()
        self._is_abandoned = False

    def abandon_rounds(self) -> None:
        """Take part in what is left of the step without computing; :meth:`wait` waits for it."""
        self._is_abandoned = True
        self.finish_rounds()
        self._is_abandoned = False

    def wait(self) -> None:
        """Wait until all gradients are with their owners."""
        while self._under_way:
            self._under_way.pop(0)[0].wait()

    def _begin(self) -> None:
        num_layers, is_active = self._table.num_units - 2, self._rounds[self._next_round]
        all_layers = WeightShard(first=0, end=num_layers, num_layers=num_layers)
        routes = self._state.routes_to([all_layers if active else None for active in is_active], is_direct=True).units
        self._routes = tuple(
            replace(route, region=slice(0, route.region.stop - route.region.start)) for route in routes
        )
        self._is_active = is_active[self._state.world.rank]
        self._next_round += 1
        self._moment = -1

    def _reach(self, moment: int) -> None:
        last = len(self._moments) - 1
        while self._moment < moment:
            self._moment += 1
            now = self._moments[self._moment]
            coming = now | self._moments[min(self._moment + 1, last)]
            for unit in sorted(self._resident - coming, reverse=True):
                self._leave(unit)
            for unit in sorted(coming - self._resident):
                self._pull(unit)
            for unit in sorted(now):
                self._use(unit)

    def _pull(self, unit: int) -> None:
        """Start to gather a unit."""
        state, route = self._state, self._routes[unit]
        self._resident.add(unit)
        share = state.master[route.own_share].to(state.compute_dtype)
        if not self._is_active or self._is_abandoned:
            scratch = share.new_empty(route.region.stop)  # nothing, or what nobody reads
            self._under_way.append((route.pull(share, scratch), scratch))
            return
        buffers = self._units.get(unit)
        if buffers is None:
            weights = share.new_empty(self._padded_size(unit))
            buffers = self._units[unit] = _Unit(weights=weights, num_bytes=weights.untyped_storage().nbytes())
        buffers.weights.untyped_storage().resize_(buffers.num_bytes)
        buffers.pull = route.pull(share, buffers.weights)

    def _use(self, unit: int) -> None:
        """Wait for a unit, and let its parameters be views of what was gathered."""
        if not self._is_active or self._is_abandoned:
            self._wait_for_all_but(1)
            return
        buffers = self._units[unit]
        if buffers.pull is not None:
            buffers.pull.wait()
            buffers.pull = None
            for slot in self._slots[unit]:
                self._state.named[slot.name].data = self._view(buffers.weights, slot)
        if self._is_backward and buffers.gradients is None:
            buffers.gradients = self._zeros(self._routes[unit])
            for slot in self._slots[unit]:
                self._state.collect_gradient(slot.name, self._view(buffers.gradients, slot))

    def _leave(self, unit: int) -> None:
        """Release a unit; in the backward, start to send its gradients."""
        self._resident.remove(unit)
        route, buffers = self._routes[unit], self._units.get(unit) if self._is_active else None
        if self._moment > len(self._moments) // 2:
            gradients = None if buffers is None else buffers.gradients
            if gradients is None:
                gradients = self._zeros(route)
            self._under_way.append((route.push(gradients, self._state.pushed), gradients))
        if buffers is not None:
            self._release(unit, buffers)
        self._wait_for_all_but(1)

    def _release(self, unit: int, buffers: _Unit) -> None:
        buffers.gradients = None
        torch.clear_autocast_cache()  # which would hold casts of the weights
        if buffers.pull is None:
            buffers.weights.untyped_storage().resize_(0)
        else:  # of a round that was abandoned: what comes needs its memory until it is there
            self._under_way.append((buffers.pull, buffers.weights))
            del self._units[unit]
        self._detach(unit)

    def _wait_for_all_but(self, number: int) -> None:
        while len(self._under_way) > number and not self._is_abandoned:
            self._under_way.pop(0)[0].wait()

    @property
    def _is_backward(self) -> bool:
        return self._moment >= len(self._moments) // 2

    def _detach(self, unit: int) -> None:
        """Leave parameters their shapes alone: they read as NaN, and writing to them is an error."""
        for slot in self._slots[unit]:
            self._state.collect_gradient(slot.name, None)
            parameter = self._state.named[slot.name]
            parameter.data = self._state.master.new_full((), torch.nan, dtype=parameter.dtype).expand(slot.shape)

    def _view(self, flat: Tensor, slot: ParameterSlot) -> Tensor:
        start = slot.start - self._table.bounds[slot.unit]
        return flat[start : start + prod(slot.shape)].view(slot.shape)

    def _zeros(self, route: UnitRoute) -> Tensor:
        return self._state.master.new_zeros(route.region.stop)

    def _padded_size(self, unit: int) -> int:
        size, num_ranks = self._table.bounds[unit + 1] - self._table.bounds[unit], self._state.world.size
        return shard_size(size, num_ranks) * num_ranks
