"""Weights that are gathered for one layer at a time, and released when it has computed.

Between micro-batches a rank has its share of the weights only. A *round* is one micro-batch of every rank that still
has one: all ranks go through the same *moments*, the positions of the forward (before the layers, each layer, after
them) and then those of the backward, in reverse. When a rank reaches a moment, it leaves the units that are not used
any more, gathers those of the next moment, and waits for those of this one; a unit that is left in the backward sends
its gradients to their owners. Ranks without a micro-batch in a round send their shares and receive gradients, so ranks
may have different numbers of micro-batches. As in ZeRO stage 3 (arXiv 1910.02054), but for uneven accumulation. Frozen
weights come and go in the same way, each dtype by itself, and have no gradients.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import WeightShard
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.state.absent_parameter import make_absent
from lengthwise.runtime.state.gathered_part import GatheredPart, parts_of
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.sharded_weights import ShardedWeights

Rounds = Sequence[tuple[bool, ...]]
"""For every round, whether each rank has a micro-batch in it."""


class LayerGather:
    """Gathers, releases and reduces the units of a model as its forward and backward reach them."""

    def __init__(
        self, state: ShardedState, used: Sequence[frozenset[int]], *, frozen: Sequence[ShardedWeights] = ()
    ) -> None:
        """``used``: the units whose parameters each position of the forward uses; position 0 is before the layers.

        ``frozen``: weights without gradients, in the same units.
        """
        self._state, self._num_units, self._used = state, state.table.num_units, used
        self.num_layers = self._num_units - 2
        self.home = next(iter(state.named.values())).device
        """Where the whole weights were."""
        self._dtype: torch.dtype | None = None
        self._pushed: Tensor | None = None
        self._parts: dict[ShardedWeights, list[GatheredPart]] = {}
        self._parts_of: dict[int, list[GatheredPart]] = {unit: [] for unit in range(self._num_units)}
        for shares in (state, *frozen):
            self._parts[shares] = parts_of(shares)
            for part in self._parts[shares]:
                self._parts_of[part.unit].append(part)
        self._resident: set[int] = set()
        self._pinned: frozenset[int] = frozenset()
        self._moments: list[frozenset[int]] = [frozenset()]
        self._moment = 0
        self._rounds: Rounds = ()
        self._next_round = 0
        self._started: tuple[Rounds, int, Sequence[WeightShard | None] | None] = ((), 0, None)
        """The arguments of the last :meth:`start`."""
        self._is_active = self._is_abandoned = False
        self.holds_shards = False
        """Whether ranks have what :meth:`start` was given to gather for a whole step, different on each."""
        self._under_way: list[tuple[AsyncResult, Tensor]] = []

    def start(self, rounds: Rounds, *, num_kept: int = 0, shards: Sequence[WeightShard | None] | None = None) -> None:
        """Begin a step of these rounds; every rank calls this.

        ``num_kept``: how many of the last layers, and the parameters after them, are gathered once for the whole step;
        ``shards``: what each rank gathers for the whole step, in which there are no rounds then.
        """
        self.wait()
        self._started = (rounds, num_kept, shards)
        state, num_layers, self.holds_shards = self._state, self.num_layers, shards is not None
        if shards is None:
            last = WeightShard(first=num_layers - num_kept, end=num_layers, num_layers=num_layers)
            shards, self._rounds = [last if num_kept else None] * state.world.size, rounds
        else:
            self._rounds, self._is_active = (), False
        kept_units = self._units_in(shards[state.world.rank])
        state.hold(shards)
        for unit in set(self._parts_of) - kept_units:
            self._release(unit)
        state.pull()
        self._gather(kept_units, shards, is_trained=False)
        state.defer_waits()
        forward = [units - kept_units for units in self._used]
        self._moments = [*forward, *reversed(forward), frozenset()]
        self._moment = len(self._moments) - 1
        self._next_round = 0

    def _units_in(self, shard: WeightShard | None) -> frozenset[int]:
        if shard is None:
            return frozenset()
        ends = ({0} if shard.has_input else set()) | ({self._num_units - 1} if shard.has_output else set())
        return frozenset({*range(shard.first + 1, shard.end + 1), *ends})

    def use(self, used: Sequence[frozenset[int]]) -> None:
        """Gather, from the next step on, what each position of the forward was seen to use.

        Raises:
            InputError: a position used weights that were not gathered for it.
        """
        wrong = next((place for place, (seen, there) in enumerate(zip(used, self._used)) if not seen <= there), None)
        if wrong is not None:
            where = f"layer {wrong - 1}" if 0 < wrong < self._num_units - 1 else "code outside of all layers"
            raise InputError(
                f"{where} computes with weights of another layer, and weights are gathered layer by layer; use "
                "weights='whole' in prepare(...)"
            )
        self._used = used

    def _gather(
        self, units: Collection[int], shards: Sequence[WeightShard | None] = (), *, is_trained: bool
    ) -> list[GatheredPart]:
        """Gather the trained or the frozen parameters of some units, until the next step starts.

        Two are on their way at once: each has buffers of its own size. ``shards``: what each rank gathers; none: all
        ranks the same.
        """
        self._find_routes(shards or [self._all_layers] * self._state.world.size)
        coming = sorted(frozenset(units).union(*map(self._units_in, shards)))
        parts = [part for unit in coming for part in self._parts_of[unit] if (part.shares is self._state) == is_trained]
        for before, part in zip([None, *parts], parts):
            if part.unit in units:
                part.start_pull(self._dtype)
            else:
                self._send_share(part)
            if before is not None:
                before.attach()
        for part in parts[-1:]:
            part.attach()
        return parts

    @contextmanager
    def pinned(self, shard: WeightShard, *, is_summed: bool = False) -> Iterator[None]:
        """Within, outside of steps, every rank has the weights of ``shard``, beside those that are pinned around it.

        ``is_summed``: at the end their gradients are summed over the ranks into each one's share; else they are lost.
        """
        if not self._pinned:
            self.start(())
        outer, units = self._pinned, self._units_in(shard) - self._pinned
        self._pinned |= units
        self._gather(units, is_trained=False)
        trained = self._gather(units, is_trained=True)
        for part in trained:
            self._collect_gradients(part)
        try:
            yield
            for part in trained if is_summed else ():
                assert part.route is not None and part.gradients is not None, "it was gathered"
                part.route.push(part.gradients, self.pushed, self._state.sums).wait()
            self._state.sums.finish()
        finally:
            self._pinned = outer
            for unit in units:
                self._release(unit)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Within, between two steps, weights are gathered in another dtype, and gradients kept from the optimizer."""
        self._set_dtype(dtype)
        self._pushed = torch.zeros_like(self._state.pushed, dtype=torch.promote_types(dtype, self._state.master_dtype))
        try:
            yield
        finally:
            self._set_dtype(None)
            self._pushed = None

    def _set_dtype(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        for unit, parts in self._parts_of.items():
            self._release(unit)
            for part in parts:
                part.forget()  # of another size

    def take_gradient(self) -> list[Tensor]:
        """This rank's share of the gradient of each trained parameter that rounds summed, flat; clears it."""
        pieces = self._state.owned_pieces(self.pushed.clone())
        self.pushed.zero_()
        return list(pieces.values())

    @property
    def pushed(self) -> Tensor:
        """Where this rank's share of gradients is summed."""
        return self._state.pushed if self._pushed is None else self._pushed

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of which each rank has a share."""
        return [parameter for shares in self._parts for parameter in shares.named.values()]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, outside of steps that were begun, every rank has all weights; what is changed equally is kept."""
        rounds, num_kept, shards = self._started
        self._state.materialize_all()
        self._gather(self._parts_of, is_trained=False)
        try:
            yield
        finally:
            self._state.local_weights().adopt()
            for shares, parts in self._parts.items():
                if shares is not self._state:
                    shares.adopt()
                    for part in parts:
                        part.forget()
            self.start(rounds, num_kept=num_kept, shards=shards)

    def adopt_frozen(self, names: Collection[str]) -> None:
        """Take this rank's share of frozen parameters that are gathered and were changed equally on every rank."""
        for shares in self._parts.keys() - {self._state}:
            shares.adopt_some(names)

    def restore(self) -> None:
        """Leave every rank all weights, where they were, in their own storage; one unit is on the device at a time."""
        self.start(())
        for unit in self._parts_of:
            for part in [*self._gather([unit], is_trained=True), *self._gather([unit], is_trained=False)]:
                for slot in part.slots:
                    parameter = part.shares.named[slot.name]
                    parameter.data = parameter.data.to(self.home, copy=True)
                part.forget()
        self._state.release_params()

    @property
    def is_begun(self) -> bool:
        """Whether a step is computed: one of its rounds was begun, or ranks hold what they need for all of it."""
        return self.holds_shards or (self._next_round > 0 and bool(self._rounds))

    @property
    def is_in_round(self) -> bool:
        """Whether this rank computes a micro-batch."""
        return self._is_active and self._moment < len(self._moments) - 1

    def begin_round(self, number: int) -> None:
        """Begin this rank's micro-batch of a round, after the rounds before it, in which it has none."""
        while self._next_round <= min(number, len(self._rounds) - 1):
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
        self._state.sums.finish()

    def _begin(self) -> None:
        is_active = self._rounds[self._next_round]
        self._find_routes([self._all_layers if active else None for active in is_active])
        self._is_active = is_active[self._state.world.rank]
        self._next_round += 1
        self._moment = -1

    @property
    def _all_layers(self) -> WeightShard:
        return WeightShard(first=0, end=self.num_layers, num_layers=self.num_layers)

    def _find_routes(self, shards: Sequence[WeightShard | None]) -> None:
        """Let parts go to those ranks that compute with them."""
        for shares, parts in self._parts.items():
            routes = shares.routes_to(shards, is_direct=True).units
            for part in parts:
                route = routes[part.unit]
                part.route = replace(route, region=slice(0, route.region.stop - route.region.start))

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
        self._resident.add(unit)
        for part in self._parts_of[unit]:
            if self._is_active and not self._is_abandoned:
                part.start_pull(self._dtype)
            else:
                self._send_share(part)

    def _send_share(self, part: GatheredPart) -> None:
        """Take part in the gather of what this rank does not compute with."""
        assert part.route is not None
        share = part.share_in(self._dtype)
        scratch = share.new_empty(part.route.region.stop)  # nothing, or what nobody reads
        self._under_way.append((part.route.pull(share, scratch), scratch))

    def _use(self, unit: int) -> None:
        """Wait for a unit, and in the backward let its gradients be summed."""
        if not self._is_active or self._is_abandoned:
            self._wait_for_all_but(1)
            return
        for part in self._parts_of[unit]:
            part.attach()
            is_summed = self.is_backward and part.gradients is None and part.shares is self._state
            if is_summed and self._state.moves_gradients:
                self._collect_gradients(part)  # else autograd leaves them with the parameters

    def _collect_gradients(self, part: GatheredPart) -> None:
        part.gradients = part.zeros(self.pushed.dtype)
        for slot in part.slots:
            self._state.collect_gradient(slot.name, part.view(part.gradients, slot))

    def _leave(self, unit: int) -> None:
        """Release a unit; in the backward, start to send its gradients."""
        self._resident.remove(unit)
        is_sent = self._moment > len(self._moments) // 2
        sent = [part for part in self._parts_of[unit] if is_sent and part.shares is self._state]
        computed = [part.gradients for part in sent]
        of_parameters = [self._state.gradients_of([slot.name for slot in part.slots]) for part in sent]
        self._release(unit)  # before gradients are copied
        for part, gradients in zip(sent, computed):
            left = of_parameters.pop(0)
            gradients = part.joined(left, self.pushed.dtype) if gradients is None else gradients
            assert part.route is not None
            self._under_way.append((part.route.push(gradients, self.pushed, self._state.sums), gradients))
        self._wait_for_all_but(1 if is_sent or not self._is_active else 0)  # gathers of a forward queue behind all

    def _release(self, unit: int) -> None:
        """Free the buffers of a unit, and leave its parameters their shapes alone."""
        torch.clear_autocast_cache()  # which would hold casts of the weights
        for part in self._parts_of[unit]:
            part.gradients = None
            if part.pull is not None:  # of a round that was abandoned: what comes needs its memory until it is there
                assert part.weights is not None
                self._under_way.append((part.pull, part.weights))
                part.weights = part.pull = None
            part.free()
            self._detach(part)

    def _wait_for_all_but(self, number: int) -> None:
        while len(self._under_way) > number and not self._is_abandoned:
            self._under_way.pop(0)[0].wait()

    @property
    def is_backward(self) -> bool:
        """Whether the step's backward of this round has begun."""
        return self._moment >= len(self._moments) // 2

    def _detach(self, part: GatheredPart) -> None:
        """Leave parameters their shapes alone: to read or write them is an error."""
        for slot in part.slots:
            if part.shares is self._state:
                self._state.collect_gradient(slot.name, None)
            dtype, device = self._dtype or part.shares.dtype_of(slot.name), self._state.world.device
            make_absent(part.shares.named[slot.name], slot.name, dtype=dtype, device=device, shape=slot.shape)
