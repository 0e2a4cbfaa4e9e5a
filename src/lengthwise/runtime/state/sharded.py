"""Optimization layout apart from compute layout: every rank updates what it owns, whatever it computes with.

All parameters lie in one flat buffer, unit by unit (:mod:`lengthwise.runtime.state.table`). Every rank owns a share of
each unit: its master weights and the optimizer's state exist nowhere else and never move. For the micro-batches that
ranks compute with the same weights, :meth:`ShardedState.hold` lays out what each needs, *pull* brings it from its
owners, *push* returns gradients, summed (:mod:`lengthwise.runtime.state.propagation`).

    master    [own]    master dtype
    pushed    [own]    gradient dtype: the gradient, summed over ranks
    weights   [held]   compute dtype; the model's parameters are views of it, or casts of views to a less precise dtype
    gradients [held]   gradient dtype; parameter gradients accumulate in it, or this rank's share of them
                       (:mod:`lengthwise.runtime.state.gradient_shares`)

Gradients are of the master dtype, or of the compute dtype if the optimizer's settings say so; of its update each part
of a unit then has them in the master dtype in turn.

One rank alone computes with what it owns: its gradients are what is pushed, and, where both dtypes are one, its weights
are the master weights.

With ``on_host``, ``master``, ``pushed`` and the optimizer's state lie in host memory, and the update runs there (as in
ZeRO-Offload, arXiv 2101.06840). Gradients are copied out as pushes end; one rank alone has no sums on its device: the
gradients of a unit go when a backward comes to another. Weights come to the device in the compute dtype, unit by unit.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.layout import Interval
from lengthwise.core.pipeline_config import GradientShare, WeightShard
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.comm.host_memory import RunningSums, UnitSums
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.state.absent_parameter import make_present
from lengthwise.runtime.state.gradient_shares import GradientShares
from lengthwise.runtime.state.local_weights import LocalWeights
from lengthwise.runtime.state.loss_scaler import LossScaler
from lengthwise.runtime.state.owned_segments import OwnedSegments, square_sum
from lengthwise.runtime.state.pulled_weights import PulledWeights
from lengthwise.runtime.state.table import ParameterTable
from lengthwise.runtime.state.unused_parameters import UnusedParameters

PUSHES_UNDER_WAY = 2
"""How many units' gradients are under way at most at the end of a step."""


class ShardedState(PulledWeights):
    """Weights, gradients and optimizer of one model over all ranks. Turns the model's parameters into views."""

    pulls_ahead = False
    """Whether ranks compute with the same weights before and after an update, which then pulls the new ones."""

    def __init__(
        self,
        model: nn.Module,
        world: DistContext,
        settings: OptimizerSettings,
        *,
        table: ParameterTable | None = None,
        on_host: bool = False,
    ) -> None:
        """``table``: which parameters, in which order; a :class:`Transformer` has its own. ``on_host``: see above."""
        if table is None:
            assert isinstance(model, Transformer), "what the units of another model are has to be said"
            table = ParameterTable.of(model)
        is_whole = settings.needs_whole_parameters
        layout = table.whole_parameters(world.size) if is_whole else table.sharded(world.size)
        super().__init__(model, world, table, layout=layout, at_least=torch.float32, on_host=on_host)
        self._of_unit = UnitSums(sums := RunningSums(on_host=on_host), self.master_dtype)
        self.sums = sums
        """Adds to ``pushed`` what pushes bring."""
        self.settings = settings
        self._is_alone = world.size == 1
        self.gradient_views: dict[str, Tensor] = {}
        """Where the gradient of each parameter is added up on this rank."""
        self._weight_views: dict[str, Tensor] = {}
        self.gradient_dtype = self.compute_dtype if settings.narrow_gradients else self.master_dtype
        self.loss_scaler = LossScaler.of(settings, self.coarsest_dtype)
        self.pushed = torch.zeros_like(self.master, dtype=self.gradient_dtype)
        self.owned = OwnedSegments(self, settings, pushed=self.pushed)
        self.optimizer = self.owned.optimizer
        self.unused = UnusedParameters({} if table.spec is not None else self.named)
        """Of a model that is not ours: one of ours uses all in every micro-batch."""
        self.saved_steps: dict[Path, frozenset[int]] = {}
        """Steps of the checkpoints that led to this state, by folder; in other folders all count as such."""
        self._hooks: list[RemovableHandle] = []
        self.moves_gradients = self.coarsest_dtype != self.gradient_dtype or (on_host and self._is_alone)
        """Whether a parameter's gradient is added elsewhere, and not kept, when a backward has made it."""
        if self.moves_gradients:
            self._hook_gradients()
        self.holdings: tuple[WeightShard | None, ...] | None = None
        self.gradient_shares: tuple[GradientShare | None, ...] = ()
        """What each rank keeps of its weights' gradients between micro-batches; None: all of them."""
        self.shares = GradientShares(table.num_units)
        """Whole gradients on their way to this rank's share."""
        self.gradients = self._nothing(self.gradient_dtype)
        self._going: list[AsyncResult] = []
        self._is_pulled = False
        self._release()

    def hold(
        self, holdings: Sequence[WeightShard | None], shares: Sequence[GradientShare | None] | None = None
    ) -> None:
        """Lay out what every rank computes with from now on; weights come with the next :meth:`pull`.

        ``shares``: what ranks keep of their gradients; None: what they do, or of other weights all.
        """
        holdings, before = tuple(holdings), self.gradient_shares
        if holdings != self.holdings:
            self.finish_pull()
            self._is_pulled = False
            self._release()
            self._held = {part.slot.unit for holding in set(holdings) for part in self.table.parts(holding)}
            self.routes, before = self.routes_to(holdings), ()
        shares = (before or (None,) * len(holdings)) if shares is None else tuple(shares)
        if shares == before:
            return
        is_shared = any(share is not None for share in shares)
        self.push_routes = self.routes_to(holdings, shares=shares) if is_shared else self.routes
        self._allocate(self.routes.num_elements, self.push_routes.num_elements)
        parts, share = self.table.parts(holdings[self.world.rank]), shares[self.world.rank]
        self.shares.lay_out(parts, share, self.push_routes, self.gradients)
        if share is not None and not self._hooks:
            self._hook_gradients()
        for part in parts:
            self._attach(part.slot.name, part.interval, part.shape, keeps_gradient=share is None)
        self.holdings, self.gradient_shares = holdings, shares

    def materialize_all(self) -> None:
        """Pull the whole model to every rank, for evaluation, measuring and tests."""
        self.pull_whole()
        self.finish_pull()

    def pull_whole(self) -> None:
        """Start to pull the whole model to every rank; whoever reads a parameter waits for its unit."""
        layers = self.table.num_units - 2
        self.hold([WeightShard(first=0, end=layers, num_layers=layers)] * self.world.size)
        self.pull()
        self.defer_waits()

    def pull(self) -> None:
        """Start the all-gather of every unit's weights to the ranks that compute with them, unless they are there.

        In the order of the units, on every rank, so that the first layer's arrive first. :meth:`need` waits.
        """
        if self._is_alone and not self._is_pulled:
            self._coming = [None] * self.table.num_units
            if self.on_host:
                for first, end in pairwise(self.table.bounds):
                    self.weights[first:end] = self.share(slice(first, end))
            elif self.compute_dtype != self.master_dtype:
                self.weights.copy_(self.master)
            self.narrow.refresh()
        elif not self._is_pulled:
            self.finish_pull()
            self._coming = [self._pulled(unit) for unit in range(self.table.num_units)]
        self._is_pulled = True
        self._next_push = self.table.num_units - 1

    def is_pushed(self, unit: int) -> bool:
        """Whether the push of ``unit`` has started in this step."""
        return unit > self._next_push

    def push_from(self, unit: int) -> None:
        """Start the reduce-scatter of the gradients of ``unit`` and all after it, which are final on this rank.

        Pushes are issued in the reverse order of the units, the same on every rank.
        """
        while self._next_push >= unit and not self._is_alone:
            if self._next_push in self._held:
                self.shares.settle(self._next_push)
                self._going.append(self.push_routes.units[self._next_push].push(self.gradients, self.pushed, self.sums))
            self._next_push -= 1
        under_way = []
        for going in self._going:
            if going.is_done:
                going.wait()
            else:
                under_way.append(going)
        self._going = under_way

    def complete(self, unit: int, *, is_last: bool) -> None:
        """Begin to reduce the gradients of ``unit``, of which ranks keep shares, or in the last backward to push them.

        Of shares, those of the unit after it are pushed: its own are on their way.
        """
        self.shares.reduce_from(unit)
        if is_last:
            self.push_from(unit + self.shares.is_active)

    def finish_push(self) -> None:
        """Push what is left, wait until every owner has its sums, and clear the gradients."""
        if not self._is_alone:
            self.push_rest()
            self._wait_for_pushes(0)
        self.settle()
        self.shares.clear()
        if not self._is_alone:
            self.gradients.zero_()

    def push_rest(self) -> None:
        """Push what is left, a few units at a time."""
        self.finish_pull()
        while self._next_push >= 0 and not self._is_alone:
            self._wait_for_pushes(PUSHES_UNDER_WAY - 1)
            self.push_from(self._next_push)

    def push_again(self) -> None:
        """Forget what was pushed, of which gradients that came late are missing; every rank calls this."""
        self._wait_for_pushes(0)
        self.shares.reduce_late()
        self.clear_gradient()
        self._next_push = self.table.num_units - 1

    def _wait_for_pushes(self, num_left: int) -> None:
        """Wait for the oldest until ``num_left`` are under way: each has room for what all ranks send to this one."""
        while len(self._going) > num_left:
            self._going.pop(0).wait()

    def release_params(self) -> None:
        """Give the parameters storage of their own again, with the current weights and no gradient."""
        self.finish_pull()
        self.unused.close()
        for hook in self._hooks:
            hook.remove()
        for parameter in self.named.values():
            parameter.grad = None
            parameter.data = parameter.data.clone()

    def discard_gradient(self) -> None:
        """Forget what backwards added since the last push, and a push that no update followed."""
        self._wait_for_pushes(0)
        self.settle()
        self.shares.clear()
        self.gradients.zero_()
        self._next_push = self.table.num_units - 1

    def take_gradient(self) -> Tensor:
        """Take the gradient that backwards added on this rank since the last push, in float64, and clear it."""
        self.settle()
        gradient = self.gradients.to(self.world.device, torch.float64, copy=True)
        self.discard_gradient()
        return gradient

    @property
    def has_gradients_elsewhere(self) -> bool:
        """Whether backwards leave no gradient with parameters."""
        return self.moves_gradients or self.shares.is_active

    @property
    def gradient_version(self) -> int:
        """Version counter that grows with every change of gradients."""
        if self._is_alone:
            self.settle()
        return self.gradients._version

    def clear_gradient(self) -> None:
        """Forget what was pushed."""
        self.settle()
        self.pushed.zero_()

    def begin_step(self) -> None:
        """Begin a step, whose update leaves parameters without a gradient as they are."""
        self.clear_gradient()
        self.unused.begin_step()

    def global_norm(self, loss: Tensor) -> tuple[float, float]:
        """Norm of the pushed gradient over all ranks, and ``loss`` summed over them: one collective for both.

        It also tells every rank which parameters no backward of the step reached on any. A loss or a gradient that is
        not finite anywhere makes one of the two not finite on every rank.
        """
        square = square_sum(self.pushed)
        values = torch.stack([square.to(self.world.device, non_blocking=True), loss.to(torch.float64)])
        square_of_all, loss_of_all, *num_uses = sum_over_ranks(self.unused.joined(values)).tolist()
        self.unused.note(num_uses)
        return square_of_all**0.5, loss_of_all

    def step(self, *, lr: float, clip: float) -> None:
        """Scale the pushed gradient by ``clip`` and let the optimizer update this rank's master weights.

        Parameters that have no gradient stay as they are, as in torch. A unit at a time: an optimizer of torch may
        allocate as much. Where ranks compute with the same weights before and after (``pulls_ahead``), those of a unit
        are on their way while the next is updated.
        """
        if is_ahead := self.pulls_ahead and not self._is_alone and self.settings.make is None:
            self.finish_pull()
            self._coming = [None] * self.table.num_units
        self._is_pulled = False
        for unit in self.owned.update(lr=lr, clip=clip, left_out=self.unused.names):
            if is_ahead:
                self._coming[unit] = self._pulled(unit)
        self._is_pulled = is_ahead
        self.unused.count_update()

    def local_weights(self) -> LocalWeights:
        """This rank's copy of the whole model, where every rank computes with all of it."""
        self.finish_pull()
        places = LocalWeights.places_of(self.owned_layout.intervals[self.world.rank], self.table.bounds, self.routes)
        return LocalWeights(
            parameters=self.named, views=self._weight_views, narrow=self.narrow, weights=self.weights,
            master=self.master, places=places,
        )  # fmt: skip

    def forget_weights(self) -> None:
        """Mark the pulled weights as out of date, after the master weights were changed."""
        self._is_pulled = False

    def _allocate(self, size: int, num_gradients: int) -> None:
        """Allocate weights of ``size`` and gradients. A single rank computes with what it owns: no copies."""
        if self._is_alone:
            assert size == len(self.master), "one rank computes with the whole model"
            self.gradients = self.pushed
            if self.compute_dtype == self.master_dtype and not self.on_host:
                self.weights = self.master
                return
        if len(self.weights) != size:
            self.weights = self._nothing(self.compute_dtype)  # freed before it is allocated anew
            self.weights = torch.zeros(size, dtype=self.compute_dtype, device=self.world.device)
        if not self._is_alone and len(self.gradients) != num_gradients:
            self._forget_gradients()
            self.gradients = torch.zeros(num_gradients, dtype=self.gradient_dtype, device=self.world.device)

    def _forget_gradients(self) -> None:
        """Free gradients before others are allocated."""
        self.gradients, self.gradient_views = self._nothing(self.gradient_dtype), {}
        self.shares.lay_out((), None, self.routes, self.gradients)
        for parameter in self.named.values():
            parameter.grad = None

    def _release(self) -> None:
        """Detach all parameters from the flat buffers."""
        self.holdings = None
        self.gradient_views, self._weight_views = {}, {}
        self.narrow.release()
        for name, parameter in self.named.items():
            make_present(parameter).grad = None
            shape = self.table.slots[name].shape
            parameter.data = parameter.data.new_empty(0 if all(shape) else shape[0], *shape[1:])

    def _attach(self, name: str, interval: Interval, shape: tuple[int, ...], *, keeps_gradient: bool) -> None:
        """Make a parameter a view of ``weights``, or its cast; its whole gradient lands in ``gradients`` or nowhere."""
        if name not in self._weight_views:
            self._weight_views[name] = self.narrow.attach(name, self.weights[self.routes.place(interval)].view(shape))
            self.named[name].data = self._weight_views[name]
        view = self.gradients[self.push_routes.place(interval)].view(shape) if keeps_gradient else None
        self.collect_gradient(name, view)

    def settle(self) -> None:
        """Wait until all gradients that go to the host are added there."""
        self._of_unit.flush()
        self.sums.finish()

    def collect_gradient(self, name: str, view: Tensor | None) -> None:
        """Let backwards add the gradient of a parameter to ``view``; None: it is not to have one."""
        if view is None:
            self.gradient_views.pop(name, None)
        else:
            self.gradient_views[name] = view
        if view is None or not self.moves_gradients:
            self.named[name].grad = view  # autograd adds to an existing gradient in place

    def gradients_of(self, names: Sequence[str]) -> list[Tensor | None]:
        """The gradients that autograd left with parameters; a mode that watches a forward does not see it."""
        with torch._C.DisableTorchFunction():
            return [self.named[name].grad for name in names]

    def _hook_gradients(self) -> None:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._add_gradient_of(name))
            for name, parameter in self.named.items()
        ]

    def _add_gradient_of(self, name: str):  # type: ignore[no-untyped-def]
        """A hook that moves a parameter's finished gradient to where it is added up, if that is not with it."""
        on_device, unit = RunningSums(on_host=False), self.table.slots[name].unit
        leaves_device = self.on_host and self._is_alone

        def add(parameter: Tensor) -> None:
            is_shared = self.shares.has(name, unit)
            # of slices of a micro-batch, one gives the head's gradient of all
            if parameter.grad is None or not (is_shared or self.moves_gradients):
                return
            gradient, parameter.grad = parameter.grad, None
            if is_shared:
                self.shares.add(name, unit, gradient)
            elif leaves_device:
                self._of_unit.add(name, unit, self.gradient_views[name], gradient)
            else:
                on_device.add(self.gradient_views[name], gradient)

        return add
