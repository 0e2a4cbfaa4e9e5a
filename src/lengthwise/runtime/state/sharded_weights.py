"""Weights of which every rank owns a share, and the routes by which they come to the ranks that compute with them."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from lengthwise.core.layout import Layout
from lengthwise.core.pipeline_config import GradientShare, WeightShard
from lengthwise.runtime.comm import host_memory
from lengthwise.runtime.comm.group import Traffic
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.state.narrow_parameters import NarrowParameters, common_dtype
from lengthwise.runtime.state.propagation import Routes, routes
from lengthwise.runtime.state.table import ParameterTable

MAX_ROUTES = 64
"""Layouts whose routes are remembered."""


class ShardedWeights:
    """Parameters that every rank has a share of; by themselves they are frozen, without any gradient."""

    def __init__(
        self,
        model: nn.Module,
        world: DistContext,
        table: ParameterTable,
        *,
        layout: Layout | None = None,
        at_least: torch.dtype | None = None,
        on_host: bool = False,
    ) -> None:
        """``layout``: what each rank owns of ``table``; None: a share of every unit. ``at_least``: the dtype of shares,
        if the parameters' own is less precise; None: their own. ``on_host``: whether shares lie in host memory.
        """
        self.world, self.table = world, table
        self.named = {name: parameter for name, parameter in model.named_parameters() if name in table.slots}
        self.compute_dtype = common_dtype(self.named.values())
        """Of the buffers that weights are gathered in; see ``narrow``."""
        self.narrow = NarrowParameters(self.named, table, self.compute_dtype)
        self.master_dtype = torch.promote_types(self.compute_dtype, at_least or self.compute_dtype)
        self.on_host = on_host
        self.owned_layout = table.sharded(world.size) if layout is None else layout
        self.sent = Traffic()
        """Bytes that pulls and pushes sent."""
        self._routes: dict[object, Routes] = {}
        first = model.first_weights if isinstance(model, Transformer) else None
        self.master = self._owned_values(self._present_value if first is None else first.value)
        if isinstance(model, Transformer):
            model.first_weights = None

    def adopt(self) -> None:
        """Take this rank's share from the parameters, which are whole."""
        self.master = self._owned_values(self._present_value)

    def adopt_some(self, names: Collection[str]) -> None:
        """Take this rank's share of the parameters with these names, which are whole, as others need not be."""
        filled = 0
        for start, end in self.owned_layout.intervals[self.world.rank]:
            for name, (first, last) in self.table.intervals.items():
                size, begin = min(end, last) - max(start, first), max(start, first) - first
                if size > 0 and name in names:
                    share = self._present_value(name).flatten()[begin : begin + size]
                    self.master[filled : filled + size] = share.to(self.compute_dtype)
                filled += max(0, size)

    @property
    def coarsest_dtype(self) -> torch.dtype:
        """The least precise dtype that a parameter has; float16, whose losses are scaled, before bfloat16."""
        dtypes = (self.compute_dtype, *self.narrow.dtypes.values())
        return min(dtypes, key=lambda dtype: (dtype.itemsize, dtype is not torch.float16))

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a parameter."""
        return self.narrow.dtypes.get(name, self.compute_dtype)

    def share(self, place: slice) -> Tensor:
        """The values of a slice of this rank's share on the device, in the dtype of weights that are gathered."""
        values = self.master[place]
        if self.on_host:
            return host_memory.to_device(values, self.compute_dtype, self.world.device)
        return values.to(self.compute_dtype)

    def routes_to(
        self,
        holdings: Sequence[WeightShard | None],
        *,
        is_direct: bool = False,
        shares: Sequence[GradientShare | None] | None = None,
    ) -> Routes:
        """The routes from owners to ranks that compute with these shards; those of recent calls are remembered.

        ``is_direct``: in one exchange each, which no rank need wait for before it issues the next, also across nodes.
        ``shares``: what ranks keep of their gradients, whose routes are asked for.
        """
        key = (is_direct if shares is None else tuple(shares), tuple(holdings))
        cached_routes = self._routes.pop(key, None)
        if cached_routes is None:
            computed = self.table.propagation(holdings) if shares is None else self.table.gradients(holdings, shares)
            cached_routes = routes(
                self.table.bounds,
                self.owned_layout,
                computed,
                rank=self.world.rank,
                sent=self.sent,
                nodes=None if is_direct else self.world.nodes,
            )
        self._routes[key] = cached_routes  # the newest last
        while len(self._routes) > MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        return cached_routes

    def owned_pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """What ``flat``, laid out as this rank's share, has of each parameter."""
        offset, pieces = 0, dict.fromkeys(self.named, flat[:0])
        for start, end in self.owned_layout.intervals[self.world.rank]:
            for name, (first, last) in self.table.intervals.items():
                if (size := min(end, last) - max(start, first)) > 0:
                    pieces[name] = flat[offset : offset + size]
                    offset += size
        return pieces

    def _present_value(self, name: str) -> Tensor:
        return self.named[name].detach()

    def _owned_values(self, value_of: Callable[[str], Tensor]) -> Tensor:
        """Values of this rank's share of weights, one of which is in memory at a time."""
        rank, filled = self.world.rank, 0
        size = self.owned_layout.num_held(rank)
        values = (
            host_memory.host_empty(size, self.master_dtype)
            if self.on_host
            else torch.empty(size, dtype=self.master_dtype, device=self.world.device)
        )
        for start, end in self.owned_layout.intervals[rank]:
            for name, (first, last) in self.table.intervals.items():
                size = min(end, last) - max(start, first)
                if size > 0:
                    begin = max(start, first) - first
                    share = value_of(name).flatten()[begin : begin + size]
                    values[filled : filled + size] = share.to(self.compute_dtype)
                    filled += size
        return values
