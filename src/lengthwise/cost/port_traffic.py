"""What every rank sends and receives when a strategy's weights are pulled; when gradients are pushed, the reverse.

The counts are those of the runtime's collectives: of the slices that :mod:`lengthwise.core.node_exchange` lists, and of
an all-gather where all ranks compute with all of a unit. Owners hold equal consecutive shares of each unit, so that
units of one shape that the same ranks compute with are counted once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from lengthwise.core.layout import row_bounds, shard_size
from lengthwise.core.parameter_shapes import Unit, unit_shapes, unit_size
from lengthwise.core.pipeline_config import Strategy, WeightPlacement
from lengthwise.core.specs import ModelSpec

MAX_STRATEGIES = 1 << 14
"""Strategies whose traffic is remembered."""

UnitShard = tuple[int, int, bool, bool]
"""What a rank has of a unit: a shard, the number of shards, whether these are equal ones of gradients and not those of
weights, and whether it is of the tied embedding alone."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PortTraffic:
    """Elements of each rank, [ranks]: between nodes, through its own port, and over its link within the node."""

    sent_across: np.ndarray
    received_across: np.ndarray
    sent_within: np.ndarray
    received_within: np.ndarray

    @cached_property
    def busiest_across(self) -> float:
        """Elements of the busiest port, in the direction in which it has more."""
        return float(max(self.sent_across.max(), self.received_across.max()))

    @cached_property
    def busiest_within(self) -> float:
        """Elements of the busiest link, in the direction in which it has more."""
        return float(max(self.sent_within.max(), self.received_within.max()))


_PipelineKey = tuple[int, tuple[int, ...], WeightPlacement, bool, tuple[int, ...]]
"""What decides which weights, or gradients, the ranks of a pipeline have: degree, layers per stage, how weights are
held, whether gradients are asked for and sharded; and its ranks."""
_Shards = list[tuple[int, int, bool]]
"""Of each rank, its shard, the number of shards, and whether they are equal ones of gradients."""


def _keys(strategy: Strategy, *, of_gradients: bool = False) -> tuple[_PipelineKey, ...]:
    return tuple(
        [
            (scheme.degree, scheme.stage_layers, scheme.weights, of_gradients and scheme.shard_gradients, ranks)
            for scheme, ranks in zip(strategy.schemes, strategy.ranks)
        ]
    )


def hold_the_same(one: Strategy, other: Strategy, *, of_gradients: bool = False) -> bool:
    """Whether every rank computes with the same weights under both strategies of one model.

    ``of_gradients``: whether it keeps the same gradients between micro-batches.
    """
    layers_and_shards = [
        _held(_keys(strategy, of_gradients=of_gradients), strategy.num_devices) for strategy in (one, other)
    ]
    return layers_and_shards[0] == layers_and_shards[1]


def port_traffic(
    model: ModelSpec, strategy: Strategy, *, ranks_per_node: int, of_gradients: bool = False, is_first: bool = False
) -> PortTraffic:
    """What the ranks of ``strategy`` send and receive in one pull of the whole model.

    ``of_gradients``: in a push, in reverse, which may be of shares. ``is_first``: of the input and the first layer.
    """
    num_devices, keys = strategy.num_devices, _keys(strategy, of_gradients=of_gradients)
    return _traffic(model, keys, num_devices, min(ranks_per_node, num_devices), is_first=is_first)


def _held(pipelines: Sequence[_PipelineKey], num_ranks: int) -> tuple[list[tuple[int, int]], _Shards]:
    """First and last layer of each rank, equal for one of none; its shard and the number of shards."""
    layers, shards = [(0, 0)] * num_ranks, [(0, 1, False)] * num_ranks
    for degree, stage_layers, weights, shares_gradients, ranks in pipelines:
        bounds = list(pairwise((0, *accumulate(stage_layers))))
        is_cut = degree > 1 and (shares_gradients or weights is WeightPlacement.SHARDED)
        for place, rank in enumerate(ranks):
            layers[rank] = bounds[place // degree]
            shards[rank] = (place % degree, degree, shares_gradients) if is_cut else (0, 1, False)
    return layers, shards


@lru_cache(maxsize=MAX_STRATEGIES)
def _traffic(
    model: ModelSpec,
    pipelines: Sequence[_PipelineKey],
    num_ranks: int,
    per_node: int,
    *,
    is_first: bool = False,
) -> PortTraffic:
    """``is_first``: of the input and the first layer alone."""
    layers, shards = _held(pipelines, num_ranks)
    total = np.zeros((4, num_ranks))
    for unit, of_ranks, count in (_first_units if is_first else _units)(model, layers, shards):
        total += count * _unit_traffic(model, unit, of_ranks, per_node)
    sent_across, received_across, sent_within, received_within = total
    return PortTraffic(
        sent_across=sent_across,
        received_across=received_across,
        sent_within=sent_within,
        received_within=received_within,
    )


_Units = Iterator[tuple[Unit, tuple[UnitShard | None, ...], int]]
"""Kinds of units, what ranks compute with of each, and how many are alike."""


def _first_units(model: ModelSpec, layers: list[tuple[int, int]], shards: _Shards) -> _Units:
    """The input and the first layer."""
    yield next(_units(model, layers, shards))
    yield (
        "layer",
        tuple((*shard, False) if first == 0 < end else None for (first, end), shard in zip(layers, shards)),
        1,
    )


def _units(model: ModelSpec, layers: list[tuple[int, int]], shards: _Shards) -> _Units:
    """Each kind of unit, what ranks compute with of it, and how many layers are alike."""

    def of_ranks(first: int, end: int) -> tuple[UnitShard | None, ...]:
        return tuple((*s, False) if a <= first and end <= b else None for (a, b), s in zip(layers, shards))

    last = max(end for _, end in layers)
    from_first, to_last = of_ranks(0, 1), of_ranks(last - 1, last)
    tied = to_last if model.tied_embeddings else (None,) * len(layers)
    yield "input", tuple(a or (b and (*b[:3], True)) for a, b in zip(from_first, tied)), 1
    num_layers_of: Counter[tuple[UnitShard | None, ...]] = Counter()
    cuts = sorted({end for ends in layers for end in ends})
    for first, end in pairwise(cuts):
        num_layers_of[of_ranks(first, end)] += end - first
    for ranks, count in num_layers_of.items():
        yield "layer", ranks, count
    yield "output", to_last, 1


def _unit_traffic(model: ModelSpec, unit: Unit, of_ranks: tuple[UnitShard | None, ...], per_node: int) -> np.ndarray:
    """[4, ranks] Elements of one unit: sent and received across nodes, sent and received within."""
    num_ranks, size = len(of_ranks), unit_size(model, unit)
    shard = shard_size(size, num_ranks)
    slices = {part: _slices(model, unit, part) for part in set(of_ranks) if part is not None}
    if None not in of_ranks and all(sum(b - a for a, b in pieces) == size for pieces in slices.values()):
        in_node = np.minimum(per_node, num_ranks - np.arange(num_ranks) // per_node * per_node)
        across = (num_ranks - in_node) * shard / in_node
        within = np.full(num_ranks, float((num_ranks - 1) * shard))
        return np.stack([across, across, within, within])
    ends = {end for pieces in slices.values() for piece in pieces for end in piece}
    cuts = np.unique([*range(0, size, shard), size, *ends])
    sizes, owners = np.diff(cuts).astype(np.float64), cuts[:-1] // shard
    segments = {
        part: np.concatenate([cuts[:0], *(np.arange(a, b) for a, b in np.searchsorted(cuts, pieces).reshape(-1, 2))])
        for part, pieces in slices.items()
    }
    nodes: dict[tuple[UnitShard | None, ...], list[int]] = {}
    for first in range(0, num_ranks, per_node):
        nodes.setdefault(of_ranks[first : first + per_node], []).append(first)
    traffic, elements = np.zeros((4, num_ranks)), _ElementsByPlace(sizes, owners % per_node, segments)
    num_nodes = np.zeros(len(sizes))
    for parts, firsts in nodes.items():
        distinct = [segments[part] for part in dict.fromkeys(parts) if part is not None]
        if not distinct:
            continue
        needed = distinct[0] if len(distinct) == 1 else np.unique(np.concatenate(distinct))
        num_nodes[needed] += len(firsts)
        landed = elements.sums(needed, len(parts))
        of_parts = np.array([elements.of_part(part, len(parts)) for part in parts])
        spread, local = of_parts.sum(axis=0), of_parts.diagonal()
        ranks = np.add.outer(firsts, np.arange(len(parts)))
        owned = _elements_of_owners(ranks, owners[needed], sizes[needed])
        traffic[0, ranks] -= owned
        traffic[1, ranks] = landed - owned
        traffic[2, ranks] = spread - local
        traffic[3, ranks] = of_parts.sum(axis=1) - local
    traffic[0] += np.bincount(owners, weights=num_nodes * sizes, minlength=num_ranks)
    return traffic


def _elements_of_owners(ranks: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[nodes, ranks of one] Elements that each rank owns, of segments of some sizes in the order of their owners."""
    ends = np.concatenate([[0.0], np.cumsum(sizes)])
    return ends[np.searchsorted(owners, ranks, side="right")] - ends[np.searchsorted(owners, ranks)]


class _ElementsByPlace:
    """Elements of segments by the place in a node of the rank that gets them from other nodes."""

    def __init__(self, sizes: np.ndarray, places: np.ndarray, segments: dict[UnitShard, np.ndarray]) -> None:
        self._sizes, self._places, self._segments = sizes, places, segments
        self._of_parts: dict[tuple[UnitShard, int], np.ndarray] = {}

    def sums(self, segments: np.ndarray, num_places: int) -> np.ndarray:
        """[num_places] Elements of some segments."""
        return np.bincount(self._places[segments] % num_places, weights=self._sizes[segments], minlength=num_places)

    def of_part(self, part: UnitShard | None, num_places: int) -> np.ndarray:
        """[num_places] Elements of a part, counted once."""
        if part is None:
            return np.zeros(num_places)
        if (part, num_places) not in self._of_parts:
            self._of_parts[part, num_places] = self.sums(self._segments[part], num_places)
        return self._of_parts[part, num_places]


@lru_cache(maxsize=MAX_STRATEGIES)
def _slices(model: ModelSpec, unit: Unit, part: UnitShard) -> list[tuple[int, int]]:
    """The intervals of a unit that make up a part of it."""
    shard, num_shards, is_share, is_embedding = part
    if is_share:
        pieces = _slices(model, unit, (0, 1, False, is_embedding))
        first, end = pieces[0][0], pieces[-1][1]  # without gaps: all of it, or one parameter
        size = shard_size(end - first, num_shards)
        start = first + shard * size
        return [(start, min(start + size, end))] if start < end else []
    if num_shards == 1 and not is_embedding:
        return [(0, unit_size(model, unit))]
    slices, start = [], 0
    for name, (rows, columns) in unit_shapes(model, unit).items():
        bounds = row_bounds(name, model, degree=num_shards) if num_shards > 1 else None
        first, end = (0, rows) if bounds is None else bounds[shard : shard + 2]
        if first < end and (not is_embedding or name == "embedding"):
            slices.append((start + first * columns, start + end * columns))
        start += rows * columns
    return slices
