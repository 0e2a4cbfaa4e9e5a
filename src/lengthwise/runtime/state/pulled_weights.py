"""Weights on their way to the ranks that compute with them: waited for unit by unit, by whoever needs one."""

from functools import partial

import torch
from torch import Tensor, nn

from lengthwise.core.layout import Layout
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.comm.side_streams import OnSideStream
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.state.pending_parameter import PendingUnits
from lengthwise.runtime.state.propagation import Routes
from lengthwise.runtime.state.sharded_weights import ShardedWeights
from lengthwise.runtime.state.table import ParameterTable


class PulledWeights(ShardedWeights):
    """Shares of weights, and those that this rank computes with, which come from their owners."""

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
        """The arguments are those of :class:`ShardedWeights`."""
        super().__init__(model, world, table, layout=layout, at_least=at_least, on_host=on_host)
        self.routes: Routes
        self.weights = self._nothing(self.compute_dtype)  # a rank may hold nothing, but of this kind
        self._held: set[int] = set()
        """Units that some rank computes with."""
        self._coming: list[AsyncResult | None] = []
        self._pending = PendingUnits(self.named, table)

    def _nothing(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=self.world.device)

    def defer_waits(self) -> None:
        """Let whoever reads a parameter wait for what was pulled."""
        for unit, coming in enumerate(self._coming):
            if coming is not None:
                self._pending.begin(unit, partial(self.need, unit))

    def _pulled(self, unit: int) -> AsyncResult | None:
        """Start the all-gather of one unit's weights; None: nobody computes with it."""
        if unit not in self._held:
            return None
        route = self.routes.units[unit]

        def start() -> AsyncResult:
            return route.pull(self.share(route.own_share), self.weights)

        if route.shard or self.world.device.type != "cuda":
            return start()
        return OnSideStream(start, self.world.device)  # each has buffers as large as the unit

    def is_coming(self, unit: int) -> bool:
        """Whether weights that ``unit`` uses are in flight: started, and not waited for yet."""
        return any(self._coming[used_unit] is not None for used_unit in self._used_by(unit))

    def need(self, unit: int) -> None:
        """Wait until the weights that ``unit`` uses are there. Where both are tied, the output uses the input's."""
        used = self._used_by(unit)
        for used_unit, coming in enumerate(self._coming):
            if coming is not None and (used_unit in used or coming.is_done):  # what was sent of the others is freed
                coming.wait()
                self._coming[used_unit] = None
                self.narrow.refresh(used_unit)
                self._pending.end(used_unit)

    def _used_by(self, unit: int) -> tuple[int, ...]:
        is_output = unit == self.table.num_units - 1
        return (0, unit) if is_output and self.table.shared else (unit,)

    def finish_pull(self) -> None:
        """Wait for all weights that were pulled, also for those that are sent from here and not used."""
        for unit in range(self.table.num_units):
            self.need(unit)
