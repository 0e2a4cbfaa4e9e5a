"""One micro-batch on the p ranks that share its layers: who holds which tokens, in which order attention sees them.

T tokens of the pack, t of this rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.execution import ExecutionWatch, MakeTables
from lengthwise.runtime.models.operators import LayerWeights, Tables
from lengthwise.runtime.parallel.attention_blocks import block_tasks
from lengthwise.runtime.parallel.head_exchange import UlyssesShards
from lengthwise.runtime.parallel.ring_attention import Ring
from lengthwise.runtime.parallel.tokens import TokenShards
from lengthwise.runtime.parallel.weights import GatheredWeights, Prefetch, WholeWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class StageView:
    """One attention view of a pack, sharded for one rank of a stage. Each index is made at first use and cached."""

    view: AttentionView
    shards: TokenShards
    group: Group
    device: torch.device
    make_tables: MakeTables

    @cached_property
    def tables(self) -> Tables | None:
        """Rotary tables of this rank's tokens."""
        return self.make_tables(self.view.offsets[self.shards.places[self.group.rank]])

    @cached_property
    def ordered_tables(self) -> Tables | None:
        """Rotary tables of the whole pack in the view's order."""
        offsets = self.view.offsets
        return self.make_tables(offsets if self.view.order is None else offsets[self.view.order])

    @cached_property
    def exchange(self) -> UlyssesShards:
        """Sizes and token order of Ulysses' all-to-alls in this view."""
        into = self.shards.into(self.view)
        return UlyssesShards(
            group=self.group,
            sizes=self.shards.sizes,
            view=self.view,
            into=None if into is None else self._index(into),
            back=None if into is None else self._index(np.argsort(into)),
        )

    @cached_property
    def ring(self) -> Ring:
        """Ring-attention tasks of this rank, for the keys and values of every rank."""
        tasks = [
            block_tasks(self.view, self.shards, rank=self.group.rank, source=source)
            for source in range(self.group.size)
        ]
        own_places = self.view.places[self.shards.places[self.group.rank]]
        is_sorted = bool(np.all(np.diff(own_places) > 0))
        return Ring(
            group=self.group,
            sizes=self.shards.sizes,
            tasks=tuple(tasks),
            into=None if is_sorted else self._index(np.argsort(own_places)),
            back=None if is_sorted else self._index(np.argsort(np.argsort(own_places))),
        )

    def _index(self, places: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(places), device=self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerStage:
    """Context of one layer of one micro-batch: all that a parallel method needs beyond tokens and weights."""

    view: StageView
    bounds: Mapping[str, Sequence[int]]
    """Rows of each weight that ranks hold, where they are sharded: see :func:`shards.row_bounds`."""
    prefetch: Prefetch
    layer: int
    is_recomputed: bool
    watch: ExecutionWatch

    @property
    def group(self) -> Group:
        """The ranks of the stage."""
        return self.view.group

    def whole(self, weights: LayerWeights) -> WholeWeights:
        """Wrap weights that this rank holds whole."""
        return WholeWeights(weights.tensors)

    def gathered(self, weights: LayerWeights) -> GatheredWeights:
        """Wrap sharded weights that are gathered when they are needed."""
        return GatheredWeights(
            weights.tensors, self.bounds, self.group, self.prefetch, layer=self.layer, is_recomputed=self.is_recomputed,
            need=partial(self.watch.need, self.layer + 1),
        )  # fmt: skip
