"""One micro-batch on the p ranks that share its layers: who holds which tokens, in which order attention sees them.

T tokens of the pack, t of this rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.head_split import ulysses_degree
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.execution import ExecutionWatch, MakeTables, SliceAttention
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.operators import AttentionWeights, LayerWeights, Tables
from lengthwise.runtime.models.products import Products
from lengthwise.runtime.models.tiles import Tiles
from lengthwise.runtime.parallel.attention_blocks import block_tasks, rows_that_travel
from lengthwise.runtime.parallel.attention_sharing import AttentionSharing
from lengthwise.runtime.parallel.group_exchange import HeadGroup, split_heads_in_groups
from lengthwise.runtime.parallel.head_exchange import Neighbours, UlyssesShards
from lengthwise.runtime.parallel.head_groups import GroupedAttention
from lengthwise.runtime.parallel.ring import GatheredBlocks, Ring
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
    _sharings: dict[tuple[int, bool], AttentionSharing] = field(default_factory=dict, init=False)
    _grouped: dict[tuple[int, int, int], GroupedAttention] = field(default_factory=dict, init=False)

    @cached_property
    def tables(self) -> Tables | None:
        """Rotary tables of this rank's tokens."""
        return self.make_tables(self.view.offsets[self.shards.places[self.group.rank]])

    @cached_property
    def ordered_tables(self) -> Tables | None:
        """Rotary tables of the whole pack in the view's order."""
        offsets = self.view.offsets
        return self.make_tables(offsets if self.view.order is None else offsets[self.view.order])

    @property
    def made_tables(self) -> tuple[Tensor, ...]:
        """The rotary tables that layers have used so far."""
        tables = (vars(self).get(name) for name in ("tables", "ordered_tables"))
        return tuple(table for pair in tables for table in pair or ())

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
        return self._ring_across(1)

    def sharing(self, method: Method, num_heads: int, num_kv_heads: int) -> AttentionSharing:
        """How the ranks share an attention of so many heads under ``method``; made once for all that are alike."""
        neighbours = ulysses_degree(method, self.group.size, num_heads, num_kv_heads)
        key = neighbours, method is Method.ALL_GATHER
        if key not in self._sharings:
            kind = GatheredBlocks if method is Method.ALL_GATHER else Ring
            if neighbours == self.group.size:
                self._sharings[key] = AttentionSharing(exchange=self.exchange, ring=None)
            elif neighbours == 1:
                self._sharings[key] = AttentionSharing(exchange=None, ring=self._ring_across(1, kind))
            else:
                among = self._exchange_among(neighbours)
                self._sharings[key] = AttentionSharing(exchange=among, ring=self._ring_across(neighbours, kind))
        return self._sharings[key]

    def attend(
        self,
        method: Method,
        q_tNH: Tensor,
        k_tKH: Tensor,
        v_tKH: Tensor,
        *,
        kept_attention: KeptAttention | None = None,
    ) -> Tensor:
        """Attention of all heads of this rank's tokens under ``method``, ``[t, N, H]``."""
        return self.sharing(method, q_tNH.shape[1], k_tKH.shape[1]).attend(
            q_tNH, k_tKH, v_tKH, kept_attention=kept_attention
        )

    def in_head_groups(self, count: int, num_heads: int, num_kv_heads: int) -> GroupedAttention:
        """Attention of so many heads in ``count`` groups; made once for all layers that are alike."""
        key = count, num_heads, num_kv_heads
        if key not in self._grouped:
            groups = split_heads_in_groups(num_heads, num_kv_heads, degree=self.group.size, count=count)
            self._grouped[key] = GroupedAttention(
                exchange=self.exchange,
                ring=self._ring_across(self.group.size),
                tables=self.tables,
                groups=tuple(
                    HeadGroup(heads, self.group.rank, group_size=num_heads // num_kv_heads, device=self.device)
                    for heads in groups
                ),
            )
        return self._grouped[key]

    def _exchange_among(self, size: int) -> UlyssesShards:
        """Sizes and token order of Ulysses' all-to-alls among ``size`` neighbouring ranks, for their tokens alone."""
        neighbours = Neighbours.of(self.group, size)
        first = self.group.rank - neighbours.rank
        places = np.concatenate(self.shards.places[first : first + size])
        return UlyssesShards(
            group=neighbours,
            sizes=self.shards.sizes[first : first + size],
            view=self.view,
            into=self._index(np.argsort(places)),
            back=self._index(np.argsort(np.argsort(places))),
        )

    def _ring_across(self, size: int, kind: type[Ring] = Ring) -> Ring:
        """The ring of the ranks at the same place of each ``size`` neighbours, which hold their tokens together."""
        shards, place = self.shards.merged(size), self.group.rank // size
        ranks = self.group.ranks[self.group.rank % size :: size]
        rows = rows_that_travel(self.view, shards)
        tasks = [
            block_tasks(self.view, shards, rank=place, source=source, rows=rows[source]) for source in range(len(ranks))
        ]
        own_places = self.view.places[shards.places[place]]
        is_sorted = bool(np.all(np.diff(own_places) > 0))
        return kind(
            group=replace(self.group, rank=place, ranks=ranks),
            sizes=tuple(
                size if travelling is None else len(travelling) for size, travelling in zip(shards.sizes, rows)
            ),
            tasks=tuple(tasks),
            travelling=None if (own_rows := rows[place]) is None else self._index(own_rows),
            into=None if is_sorted else self._index(np.argsort(own_places)),
            back=None if is_sorted else self._index(np.argsort(np.argsort(own_places))),
        )

    def _index(self, places: Sequence[int] | np.ndarray) -> Tensor:
        return to_device(np.asarray(places), self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerStage:
    """Context of one layer of one micro-batch: all that a parallel method needs beyond tokens and weights."""

    view: StageView
    bounds: Mapping[str, Sequence[int]]
    """Rows of each weight that ranks hold, where they are sharded: see :func:`shards.row_bounds`."""
    prefetch: Prefetch
    layer: int
    tiles: Tiles
    head_groups: int
    products: Products
    kept_attention: KeptAttention | None
    """What attention keeps for the second forward of the layer."""
    slice_attention: SliceAttention | None
    """Attention of this rank's heads in a slice of a pack; None: all of the pack is computed."""
    watch: ExecutionWatch

    @property
    def group(self) -> Group:
        """The ranks of the stage."""
        return self.view.group

    def in_head_groups(self, weights: AttentionWeights) -> GroupedAttention | None:
        """Attention of the layer in groups of heads, if the plan has any."""
        if self.head_groups == 1:
            return None
        num_kv_heads = self.bounds["qkv"][-1] // ((weights.group_size + 2) * weights.head_size)
        return self.view.in_head_groups(self.head_groups, num_kv_heads * weights.group_size, num_kv_heads)

    def whole(self, weights: LayerWeights) -> WholeWeights:
        """Wrap weights that this rank holds whole."""
        return WholeWeights(weights.tensors, self.products)

    def gathered(self, weights: LayerWeights) -> GatheredWeights:
        """Wrap sharded weights that are gathered when they are needed."""
        return GatheredWeights(
            weights.tensors, self.bounds, self.group, self.prefetch, layer=self.layer,
            is_recomputed=self.tiles.is_recomputed, need=partial(self.watch.need, self.layer + 1),
        )  # fmt: skip
