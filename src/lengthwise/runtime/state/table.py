"""Where each parameter lies in the flat buffer, and which part of it a rank holds, to update or to compute with.

The buffer is made of *units*, the parts of a model whose weights come and go together: its input, each layer, its
output. Two kinds of layout cut it: the optimization layout, in which every rank owns a share of every unit, and
propagation layouts, in which ranks hold what their strategy has them compute with.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from torch import nn

from lengthwise.core.layout import Interval, Layout, row_bounds, shard_size, sharded_by_unit
from lengthwise.core.pipeline_config import GradientShare, WeightShard
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.base import Transformer


@dataclass(frozen=True, kw_only=True)
class ParameterSlot:
    """Place of one parameter in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    unit: int
    start: int

    @property
    def interval(self) -> Interval:
        """First and end element of the parameter in the buffer."""
        return self.start, self.start + prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ParameterRows:
    """The rows of one parameter that a rank computes with."""

    slot: ParameterSlot
    interval: Interval
    """Of the buffer; may be empty."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterTable:
    """All parameters of a model, in the order of their units."""

    slots: Mapping[str, ParameterSlot]
    bounds: tuple[int, ...]
    """Unit u is the elements ``bounds[u]`` to ``bounds[u + 1]``."""
    spec: ModelSpec | None
    """None of a model that is not ours, whose weights ranks hold whole."""
    shared: frozenset[str] = frozenset()
    """Parameters of the input that the output uses as well."""

    @classmethod
    def of(cls, model: Transformer) -> "ParameterTable":
        """Make the table of a model."""
        units = {name: model.unit_of(name) for name, _ in model.named_parameters()}
        shared = frozenset({"embedding"}) if model.spec.tied_embeddings else frozenset()
        return cls.of_units(model, units, model.num_units, spec=model.spec, shared=shared)

    @classmethod
    def of_units(
        cls,
        model: nn.Module,
        units: Mapping[str, int],
        num_units: int,
        *,
        spec: ModelSpec | None = None,
        shared: frozenset[str] = frozenset(),
    ) -> "ParameterTable":
        """Make the table of those parameters that ``units`` names, by the unit of each."""
        parameters = dict(model.named_parameters())
        slots, sizes, start = {}, [0] * num_units, 0
        for name in sorted(units, key=lambda name: units[name]):  # stable within a unit
            shape = tuple(parameters[name].shape)
            slots[name] = ParameterSlot(name=name, shape=shape, unit=units[name], start=start)
            start += prod(shape)
            sizes[units[name]] += prod(shape)
        return cls(slots=slots, bounds=tuple(accumulate(sizes, initial=0)), spec=spec, shared=shared)

    @property
    def digest(self) -> str:
        """Sixteen hex digits: equal where the model is the same."""
        if self.spec is not None:
            return self.spec.digest
        shapes = [(slot.name, slot.shape, slot.unit) for slot in self.slots.values()]
        return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole buffer."""
        return self.bounds[-1]

    @property
    def num_units(self) -> int:
        """Number of units: input, layers and output."""
        return len(self.bounds) - 1

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Number of elements of each unit."""
        return tuple(end - start for start, end in pairwise(self.bounds))

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Interval of the buffer of each parameter."""
        return {name: slot.interval for name, slot in self.slots.items()}

    def sharded(self, num_ranks: int) -> Layout:
        """Layout in which every unit is fully sharded over all ranks."""
        return sharded_by_unit(self.bounds, num_ranks)

    def whole_parameters(self, num_ranks: int) -> Layout:
        """Layout in which every parameter is on one rank; the largest first, each to the rank that owns least."""
        intervals_of_rank: list[list[Interval]] = [[] for _ in range(num_ranks)]
        sizes = [0] * num_ranks
        for start, end in sorted(self.intervals.values(), key=lambda interval: interval[0] - interval[1]):
            rank = sizes.index(min(sizes))
            intervals_of_rank[rank].append((start, end))
            sizes[rank] += end - start
        return Layout(
            num_elements=self.num_elements, intervals=tuple(tuple(sorted(intervals)) for intervals in intervals_of_rank)
        )

    def parts(self, holding: WeightShard | None) -> list[ParameterRows]:
        """Parameter rows that a rank with this weight shard computes with, in the order of the buffer."""
        if holding is None:
            return []
        units = {layer + 1 for layer in range(holding.first, holding.end)}
        units |= {0} if holding.has_input else set()
        units |= {self.num_units - 1} if holding.has_output else set()
        rows = [
            slot
            for slot in self.slots.values()
            if slot.unit in units or (holding.has_output and slot.name in self.shared)
        ]
        return [self._part(slot, holding) for slot in rows]

    def propagation(self, holdings: Sequence[WeightShard | None]) -> Layout:
        """The layout in which each rank has what it computes with."""
        intervals_of = {holding: self._intervals(self.parts(holding)) for holding in set(holdings)}
        return Layout(num_elements=self.num_elements, intervals=tuple(intervals_of[holding] for holding in holdings))

    def gradients(self, holdings: Sequence[WeightShard | None], shares: Sequence[GradientShare | None]) -> Layout:
        """The layout of gradients between micro-batches: of what each rank computes with, all or an equal share."""
        of_ranks = list(zip(holdings, shares))
        intervals_of = {
            (holding, share): self._share_of(self._intervals(self.parts(holding)), share)
            for holding, share in set(of_ranks)
        }
        return Layout(num_elements=self.num_elements, intervals=tuple(intervals_of[of_rank] for of_rank in of_ranks))

    def _share_of(self, intervals: tuple[Interval, ...], share: GradientShare | None) -> tuple[Interval, ...]:
        """One of the equal consecutive shares of what ``intervals`` have of each unit."""
        if share is None:
            return intervals
        place, num_shares = share
        cut: list[Interval] = []
        for first, end in pairwise(self.bounds):
            of_unit = [interval for interval in intervals if first <= interval[0] < end]
            size = shard_size(sum(b - a for a, b in of_unit), num_shares)
            start = -place * size  # of the unit's first interval, counted from where this share begins
            for a, b in of_unit:
                low, high = max(0, start), min(size, start + b - a)
                if low < high:
                    cut.append((a + low - start, a + high - start))
                start += b - a
        return tuple(cut)

    def _intervals(self, parts: Sequence[ParameterRows]) -> tuple[Interval, ...]:
        """Intervals of these parts; neighbours of one unit are merged."""
        intervals: list[Interval] = []
        units: list[int] = []
        for part in parts:
            start, end = part.interval
            if start == end:
                continue
            if intervals and intervals[-1][1] == start and units[-1] == part.slot.unit:
                intervals[-1] = (intervals[-1][0], end)
            else:
                intervals.append((start, end))
                units.append(part.slot.unit)
        return tuple(intervals)

    def _part(self, slot: ParameterSlot, holding: WeightShard) -> ParameterRows:
        start, end = slot.interval
        bounds = None
        if holding.num_shards > 1:
            assert self.spec is not None, "how to shard the weights of a model that is not ours is not known"
            bounds = row_bounds(slot.name, self.spec, degree=holding.num_shards)
        if bounds is None:
            return ParameterRows(slot=slot, interval=(start, end), shape=slot.shape)
        first, last = bounds[holding.shard], bounds[holding.shard + 1]
        width = prod(slot.shape[1:])
        return ParameterRows(
            slot=slot, interval=(start + first * width, start + last * width), shape=(last - first, *slot.shape[1:])
        )
