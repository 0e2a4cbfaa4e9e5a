"""Candidates that may hold a sequence of some length, the cheaper kinds first, and those that hold the longest."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate, most_tokens
from lengthwise.plan.space.memory_ladder import head_group_candidates, ladder_candidates, selective_candidates
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.plan.space.sharded_gradients import GradientSharding, with_sharded
from lengthwise.plan.space.sliced_packs import Slices, in_slices

MOST_ROUNDS = 8
"""How often candidates are made for a longer sequence than those before hold."""


@dataclass(frozen=True, kw_only=True)
class LengthSearch:
    """What is looked at for a length. Which rungs of the memory ladder are made depends on it."""

    search_space: SearchSpace
    costs: tuple[AnalyticCost, ...]
    """With the optimizer's state on the device, and on the host where that may be."""

    def candidates_for(self, length: int) -> list[Candidate]:
        """Candidates up to the first kind of which one holds ``length`` tokens; of all kinds where none does."""
        candidates: list[Candidate] = []
        for kind, cost in product((_with_ladder, _in_groups, _in_slices), self.costs):
            candidates += kind(self.search_space, cost, length)
            if most_tokens(candidates) >= length:
                break
        return candidates

    def sliced_for(self, length: int) -> list[Candidate]:
        """Candidates in slices that hold ``length`` tokens; else, of each cost, the one that holds the most."""
        return [candidate for cost in self.costs for candidate in _in_slices(self.search_space, cost, length)]


def holding_more(make: Callable[[int], list[Candidate]], num_tokens: int) -> list[Candidate]:
    """The candidates that ``make`` makes for the longest sequence of which one holds more than ``num_tokens``."""
    candidates: list[Candidate] = []
    for _ in range(MOST_ROUNDS):
        longer = make(num_tokens + 1)
        if most_tokens(longer) <= num_tokens:
            break
        candidates, num_tokens = longer, most_tokens(longer)
    return candidates


def schemes_of(
    search_space: SearchSpace, cost: AnalyticCost, *, recomputed: Sequence[int] | None = None
) -> list[PipelineConfig]:
    """Schemes of the search space, those with sharded gradients too where it may choose them."""
    schemes = search_space.schemes(cost.model.num_layers, cost.cluster, recomputed=recomputed)
    return with_sharded(schemes) if search_space.shard_gradients is GradientSharding.AUTO else schemes


def priced(schemes: Sequence[PipelineConfig], cost: AnalyticCost, cluster: ClusterSpec) -> Iterator[Candidate]:
    """Candidates that ``cost`` has a price for and the cluster has the devices for, fitting or not."""
    for scheme in schemes:
        candidate = Candidate(scheme=scheme, cost=cost, num_cluster_devices=cluster.num_devices)
        try:
            if scheme.num_devices <= cluster.num_devices and candidate.max_tokens >= 0:
                yield candidate
        except InputError:
            continue  # such as more devices than the model has heads


def groups_of_heads(
    search_space: SearchSpace, cost: AnalyticCost, *, beside: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Candidates whose attention computes groups of heads, and which hold more tokens than all of ``beside``."""
    cluster = cost.cluster
    return list(
        head_group_candidates(
            schemes_of(search_space, cost, recomputed=(0,)), beside, cost,
            num_devices=cluster.num_devices, num_groups=cost.head_groups,
            has_host=cluster.device.host_bytes_per_s > 0,
        )
    )  # fmt: skip


def _with_ladder(search_space: SearchSpace, cost: AnalyticCost, length: int) -> list[Candidate]:
    """Candidates with selective recompute, offload and tiles too, where that pays or so long a sequence needs it."""
    cluster, schemes = cost.cluster, schemes_of(search_space, cost)
    candidates = tuple(priced(schemes, cost, cluster))
    present = tuple([candidate for candidate in candidates if candidate.max_tokens])
    options: dict[str, Any] = {"num_devices": cluster.num_devices, "max_length": length}
    selective = selective_candidates(schemes, present, cost, **options)
    has_host = cluster.device.host_bytes_per_s > 0
    more = ladder_candidates(schemes, present + selective, cost, **options, has_host=has_host)
    return [*candidates, *selective, *more]


def _in_groups(search_space: SearchSpace, cost: AnalyticCost, length: int) -> list[Candidate]:
    """Candidates whose attention computes groups of heads, which hold a sequence of ``length`` or hold the most."""
    return _holding(groups_of_heads(search_space, cost), length)


def _in_slices(search_space: SearchSpace, cost: AnalyticCost, length: int) -> list[Candidate]:
    """Candidates whose micro-batches have slices, which hold a sequence of ``length`` or hold the most."""
    if search_space.slices is Slices.NONE:
        return []
    return _holding(in_slices(_with_ladder(search_space, cost, length)), length)


def _holding(candidates: Sequence[Candidate], length: int) -> list[Candidate]:
    """The candidates that hold a sequence of ``length``; else the one that holds the most, whose limit is told."""
    fitting = [candidate for candidate in candidates if candidate.max_tokens >= length]
    return fitting or sorted(candidates, key=lambda candidate: -candidate.max_tokens)[:1]
