"""Two-stage assignment (Hydraulis Eq. 1 to 3): sequences to the pipelines of a strategy, then to micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lengthwise.core.pipeline_config import Strategy
from lengthwise.cost.overlapped import OverlappedCost
from lengthwise.plan.heterogeneous.fewer_slices import in_usual_slices
from lengthwise.plan.solve.shop import Machines, ShopSchedule
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft
from lengthwise.plan.space.draft_times import step_times_s
from lengthwise.plan.space.placement import place
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

SLACK = 1e-9
"""Relative, for the rounding of sums."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineGroup:
    """Equal pipelines of a strategy."""

    candidate: Candidate
    """How packs run."""
    count: int
    leaner: tuple[Candidate, ...] = ()
    """Candidates of the same family for sequences too long for ``candidate``, which then have a pack of their own: each
    holds more tokens than the one before, in more time."""

    @cached_property
    def limits(self) -> np.ndarray:
        """Most tokens of each candidate, ``candidate`` first."""
        return np.array([candidate.max_tokens for candidate in (self.candidate, *self.leaner)])

    @property
    def max_length(self) -> int:
        """Longest sequence a pipeline holds."""
        return int(self.limits[-1])

    def times_s(self, priced: PricedBatch) -> np.ndarray:
        """[num_sequences] seconds per stage of each sequence, inf where it does not fit."""
        lengths = priced.lengths
        times_s = priced.times_s(self.candidate)
        if lengths.max() <= self.limits[0]:
            return times_s
        times_s = times_s.copy()
        needed = np.searchsorted(self.limits, lengths)
        least_s = times_s[needed == 0].max(initial=0.0)
        for number, candidate in enumerate(self.leaner, start=1):
            mine = needed == number
            if mine.any():
                alone_s = priced.times_s(candidate)[mine] + priced.overhead_s(candidate)
                times_s[mine] = np.maximum(alone_s - priced.overhead_s(self.candidate), least_s)  # sums are rounded
                least_s = times_s[mine].max()
        times_s[lengths > self.limits[-1]] = np.inf
        return times_s

    def run_of(self, num_tokens: int) -> Candidate:
        """The candidate that a pack of ``num_tokens`` runs as."""
        return (self.candidate, *self.leaner)[int(np.searchsorted(self.limits, num_tokens))]

    def machines(self, problem: PlanningProblem) -> Machines:
        """What the scheduler knows of these pipelines."""
        return Machines(
            count=self.count,
            stages=problem.flow_stages(self.candidate),
            setup=0.0 if problem.overhead_per_sequence else self.candidate.overhead_s,
            capacity=self.candidate.max_tokens,
            min_fill=self.candidate.cost.util_tokens(self.candidate.scheme),
            takes_larger=bool(self.leaner),
        )


class PlacedStrategy:
    """Tiles on the ranks of a cluster, ready to be given batches."""

    def __init__(self, problem: PlanningProblem, tiles: Sequence[PipelineGroup]) -> None:
        self.problem = problem
        self.tiles = tuple(tiles)
        self.max_length = max(tile.max_length for tile in tiles)
        self._machines = [tile.machines(problem) for tile in tiles]
        self._bounding = [  # packs of short sequences may have one slice
            replace(
                machines,
                stages=problem.bounding_stages(tile.candidate),
                setup=machines.setup / tile.candidate.scheme.slices,
            )
            for machines, tile in zip(self._machines, tiles)
        ]
        counts = [(tile.candidate, tile.count) for tile in tiles]
        ranks: dict[Candidate, list[tuple[int, ...]]] = {}
        used = sum(candidate.num_devices * count for candidate, count in counts)
        for candidate, pipeline_ranks in place(counts, used, problem.devices_per_node):
            ranks.setdefault(candidate, []).append(pipeline_ranks)
        self._ranks = [ranks[tile.candidate].pop(0) for tile in tiles for _ in range(tile.count)]
        self._tile_of = [tile for tile in tiles for _ in range(tile.count)]

    @cached_property
    def update_s(self) -> float:
        """Seconds of a step outside its micro-batches."""
        schemes = tuple(tile.candidate.scheme for tile in self._tile_of)
        num_idle = self.problem.num_devices - sum(map(len, self._ranks))
        return self.problem.cost.update_s(Strategy(schemes=schemes, ranks=tuple(self._ranks), num_idle=num_idle))

    @property
    def name(self) -> str:
        """Counts and schemes, as tables show them."""
        return " + ".join(f"{tile.count} x {tile.candidate.scheme.name}" for tile in self.tiles)

    @property
    def num_pipelines(self) -> int:
        """Pipelines of all tiles."""
        return len(self._ranks)

    def alone_s(self, priced: PricedBatch, positions: np.ndarray) -> np.ndarray:
        """Seconds of each of some sequences alone on its best pipeline."""
        return self._alone_s(priced, self._work(priced)[:, positions])

    def _alone_s(self, priced: PricedBatch, work_s: np.ndarray) -> np.ndarray:
        """Seconds alone of sequences of this work [tiles, sequences]."""
        stages = np.array([[tile.candidate.alone_stages] for tile in self.tiles])
        overheads_s = np.array([[priced.overhead_s(tile.candidate)] for tile in self.tiles])
        least_s: np.ndarray = ((work_s + overheads_s) * stages).min(axis=0)
        return least_s

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches of ``priced`` take at least, cheaply told; inf if one fits nowhere.

        As if sequences could be spread over all devices, each as the tile that takes fewest device-seconds; and the
        longest alone on its best pipeline.
        """
        if priced.lengths.max() > self.max_length:
            return np.inf
        work_s = self._work(priced)
        devices = np.array([[tile.candidate.num_devices] for tile in self.tiles])
        even_s = float((devices * work_s).min(axis=0).sum()) / self.problem.num_devices
        return max(even_s, float(self._alone_s(priced, work_s).max())) * (1 - SLACK)

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches of ``priced`` take at least on these pipelines; inf if one fits nowhere."""
        if priced.lengths.max() > self.max_length:
            return np.inf
        work_s = self._work(priced)
        bound_s = priced.certificate(work_s, self._bounding).bound
        if self._bounding == self._machines:
            return bound_s
        return max(bound_s, float(self._alone_s(priced, work_s).max()) * (1 - SLACK))

    def planned(self, priced: PricedBatch) -> tuple[Phase, float]:
        """The pipelines with their packs, and the step's seconds beyond ``update_s``; nothing is known of filler."""
        phase, assignment = self.assign(priced)
        is_split = any(
            tile.candidate.scheme.zero_bubble for tile in self.tiles
        )  # what bounds them is not what they take
        is_sum = self._bounding == self._machines and not is_split and not isinstance(self.problem.cost, OverlappedCost)
        if is_sum or self.problem.lattice is not None:
            return phase, assignment.makespan
        phase = tuple([in_usual_slices(priced, pipeline) for pipeline in phase])
        return phase, sum(step_times_s(priced, DraftPlan(phases=(phase,)))) - self.update_s

    def assign(self, priced: PricedBatch) -> tuple[Phase, ShopSchedule]:
        """The pipelines with their packs; micro-batches of the schedule in issue order."""
        assignment = priced.scheduled(self._work(priced), self._machines)  # what bounds 1F1B is for users
        return tuple(
            map(self._pipeline, self._tile_of, self._ranks, assignment.batches, [priced] * len(self._ranks))
        ), assignment

    def _pipeline(
        self, tile: PipelineGroup, ranks: tuple[int, ...], packs: tuple[tuple[int, ...], ...], priced: PricedBatch
    ) -> PipelineDraft:
        runs: tuple[Candidate, ...] = ()
        if tile.leaner and packs:
            lengths = priced.batch.lengths
            runs = tuple(tile.run_of(sum(lengths[i] for i in pack)) for pack in packs)
            runs = () if all(run is tile.candidate for run in runs) else runs
        return PipelineDraft(candidate=tile.candidate, ranks=ranks, packs=packs, runs=runs)

    def _work(self, priced: PricedBatch) -> np.ndarray:
        return np.stack([tile.times_s(priced) for tile in self.tiles])
