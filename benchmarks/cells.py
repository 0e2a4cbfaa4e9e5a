"""What the planning benchmarks plan: published costs, lengths like the published ones, strategies by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from hydraulis_cost import TABLES, PublishedCost

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import ClusterSpec, cluster_preset
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.heterogeneous.two_stage_assignment import PipelineGroup, PlacedStrategy
from lengthwise.plan.solve.shop import Machines, Objective
from lengthwise.plan.space.candidate import Candidate, make_candidates
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.search_space import first_batches, sample_lengths

CONTEXT_TOKENS = 32_768
"""Where longer sequences are cut, as in the published experiments."""
TOKENS_PER_DEVICE = 200_000 // 64
"""Of a global batch: 200K on 64 devices, 3.2M on 1,024."""
CORPUS_SEQUENCES = 200_000
NAMES = {"cc": "commoncrawl", "gh": "githubcode"}
SHORT = {"llama-7b": "7B", "llama-13b": "13B", "llama-32b": "32B"}
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one cluster with one corpus under one reading of the published costs."""

    model: str
    num_devices: int
    data: str
    """``cc`` or ``gh``."""
    per_sequence: bool = False
    """Charge c per sequence, as Eq. (1) is printed, instead of per micro-batch, as the published code does."""
    objective: Objective = Objective.FLOW_SHOP
    context: int = CONTEXT_TOKENS
    """Longer sequences are cut there."""
    drops_longer: bool = False
    """Longer sequences are left out instead."""
    tokens: int = 0
    """Of a global batch; 0: ``TOKENS_PER_DEVICE`` a device."""

    @property
    def name(self) -> str:
        """As tables show it."""
        charge = "c per sequence" if self.per_sequence else "c per micro-batch"
        return f"{SHORT[self.model]}, {self.num_devices} GPUs, {self.data}, {charge}"

    @property
    def tokens_per_step(self) -> int:
        """Token budget of a global batch."""
        return self.tokens or TOKENS_PER_DEVICE * self.num_devices

    @property
    def corpus(self) -> LengthIndex:
        """Lengths of the corpus, none longer than the context."""
        return corpus(self.data, self.context, drops_longer=self.drops_longer)

    @property
    def problem(self) -> PlanningProblem:
        """The published pool, with typical batches that are not those of :meth:`batches`."""
        return _problem(self)

    def batches(self, count: int) -> list[GlobalBatch]:
        """The first global batches of the run."""
        return first_batches(self.corpus, tokens_per_step=self.tokens_per_step, seed=SEED, steps=count)

    def priced(self, batch: GlobalBatch) -> PricedBatch:
        """A batch of which nothing is priced yet."""
        return PricedBatch(self.problem, batch)

    def candidate(self, place: tuple[int, int]) -> Candidate:
        """The pipeline of a degree and a number of stages."""
        return next(
            candidate
            for candidate in self.problem.candidates
            if (candidate.scheme.degree, candidate.num_stages) == place
        )

    def strategy(self, words: str) -> PlacedStrategy:
        """Pipelines such as ``<16,1> + 6 x <8,1>``, those that hold the longest sequences first."""
        counts = parse_strategy(words)
        tiles = [PipelineGroup(candidate=self.candidate(place), count=count) for place, count in counts]
        return PlacedStrategy(self.problem, sorted(tiles, key=lambda tile: -tile.max_length))


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """What a strategy makes of a batch, with no word of this domain: for solvers that are not ours."""

    work: np.ndarray
    """[K, B]; inf where a job may not run."""
    sizes: np.ndarray
    machines: tuple[Machines, ...]

    @classmethod
    def of(cls, strategy: PlacedStrategy, priced: PricedBatch) -> "Instance":
        """The instance that ``strategy.assign(priced)`` solves."""
        return cls(
            work=np.stack([tile.times_s(priced) for tile in strategy.tiles]),
            sizes=priced.lengths,
            machines=tuple(tile.machines(strategy.problem) for tile in strategy.tiles),
        )

    @property
    def candidates(self) -> list[int]:
        """Type of each machine."""
        return [candidate for candidate, each in enumerate(self.machines) for _ in range(each.count)]


@cache
def _problem(cell: Cell) -> PlanningProblem:
    cluster = a800s(cell.num_devices)
    return PlanningProblem(
        candidates=published_candidates(cell.model, cell.num_devices),
        num_devices=cell.num_devices,
        devices_per_node=cluster.devices_per_node,
        memory_bytes=cluster.device.memory_bytes,
        max_length=cell.context,
        samples=tuple(sample_lengths(cell.corpus, tokens_per_step=cell.tokens_per_step, seed=SEED)),
        objective=cell.objective,
        overhead_per_sequence=cell.per_sequence,
    )


@lru_cache(maxsize=8)
def corpus(data: str, context: int = CONTEXT_TOKENS, *, drops_longer: bool = False) -> LengthIndex:
    """Lengths of ``cc`` or ``gh``, longer sequences cut at the context length or left out."""
    lengths = synthetic_lengths(NAMES[data], CORPUS_SEQUENCES, SEED)
    return LengthIndex(lengths=lengths[lengths <= context] if drops_longer else np.minimum(lengths, context))


def a800s(num_devices: int) -> ClusterSpec:
    """Nodes of 8 A800s, or one smaller node."""
    inside = min(8, num_devices)
    return cluster_preset(f"{num_devices // inside}x{inside}xA800-80GB")


@lru_cache(maxsize=16)
def published_candidates(model: str, num_devices: int) -> tuple[Candidate, ...]:
    """Every scheme that was measured and fits."""
    cost = PublishedCost(model, cluster=a800s(num_devices))
    table = TABLES[model]
    schemes = [
        uniform_scheme(
            table.num_layers,
            degree=degree,
            stages=stages,
            method=Method.DENSE if degree == 1 else Method.MEGATRON_TS,
        )
        for degree, stages in table.fits_ms
    ]
    return make_candidates(schemes, cost, num_devices=num_devices)


def parse_strategy(words: str) -> list[tuple[tuple[int, int], int]]:
    """((degree, stages), count) of ``<16,1> + 6 x <8,1>``."""
    found = re.findall(r"(?:(\d+) x )?<(\d+),(\d+)>", words)
    assert found, f"no strategy: {words}"
    return [((int(degree), int(stages)), int(count or 1)) for count, degree, stages in found]


def homogeneous_strategies(cell: Cell) -> list[PlacedStrategy]:
    """Equal pipelines that tile the cluster and hold the longest sequence."""
    problem = cell.problem
    return [
        PlacedStrategy(
            problem, [PipelineGroup(candidate=candidate, count=problem.num_devices // candidate.num_devices)]
        )
        for candidate in problem.candidates
        if problem.num_devices % candidate.num_devices == 0 and candidate.max_tokens >= problem.max_length
    ]


def mean_s(strategy: PlacedStrategy, cell: Cell, batches: Sequence[GlobalBatch]) -> float:
    """Mean planned seconds of the micro-batches; inf if some sequence does not fit."""
    spans = []
    for batch in batches:
        priced = cell.priced(batch)
        if priced.lengths.max() > strategy.max_length:
            return np.inf
        spans.append(strategy.assign(priced)[1].makespan)
    return float(np.mean(spans))


def mean_step_s(strategy: PlacedStrategy, cell: Cell, batches: Sequence[GlobalBatch]) -> float:
    """Mean planned seconds of the whole step, its update included; inf if some sequence does not fit."""
    return mean_s(strategy, cell, batches) + strategy.update_s


def best_span_s(strategies: Sequence[PlacedStrategy], priced: PricedBatch) -> float:
    """Seconds of the micro-batches under the best of some strategies; one at least holds every sequence."""
    return best_strategy(strategies, priced)[1]


def best_strategy(strategies: Sequence[PlacedStrategy], priced: PricedBatch) -> tuple[int, float]:
    """Which of some strategies takes the fewest seconds for the micro-batches, and how many."""
    bounds_s = [strategy.bound_s(priced) for strategy in strategies]
    best, best_s = -1, np.inf
    for number in np.argsort(bounds_s, kind="stable").tolist():
        if bounds_s[number] >= best_s or not np.isfinite(bounds_s[number]):
            break
        span_s = strategies[number].assign(priced)[1].makespan
        best, best_s = (number, span_s) if span_s < best_s else (best, best_s)
    return best, float(best_s)


def best_homogeneous(cell: Cell, batches: Sequence[GlobalBatch]) -> PlacedStrategy:
    """The homogeneous strategy that is fastest on ``batches``."""
    return min(homogeneous_strategies(cell), key=lambda strategy: mean_step_s(strategy, cell, batches))


def short_name(strategy: PlacedStrategy) -> str:
    """Counts, degrees and stages."""
    return " + ".join(
        (f"{tile.count} x " if tile.count > 1 else "") + f"<{tile.candidate.scheme.degree},{tile.candidate.num_stages}>"
        for tile in strategy.tiles
    )
