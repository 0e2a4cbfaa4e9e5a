"""Data-centric parallel: each bucket of lengths at its best batch size and degree, in as many groups as balance.

Per bucket the micro-batch (b, p) has the greatest throughput b s / (p T) of Eq. (1); ``dcp-intra`` also recomputes as
few layers as fit, micro-batch by micro-batch, where ``dcp-inter`` recomputes the fewest that the longest sequence of
the run allows, for all. DCP forms its batches so that groups balance (``lengthwise.plan.dcp.form_batches``); here the
sampler's batch is given, and what is chosen is how many groups of each degree there are and how many micro-batches each
accumulates, so that the last group ends early. Groups of the longer buckets fill their spare time with shorter
sequences; and where buckets do not fit side by side, the step has phases: weights are whole, so device groups change
freely within it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, islice, pairwise

import numpy as np

from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.pipeline_config import WeightPlacement
from lengthwise.core.wording import bytes_in_words
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.dcp.bucketed_batch import BucketedBatch
from lengthwise.plan.dcp.deal_buckets import Dealer, evenly
from lengthwise.plan.dcp.device_groups import GroupPlanner, Tiling
from lengthwise.plan.dcp.length_buckets import LengthBuckets, make_buckets
from lengthwise.plan.dcp.recompute_levels import RecomputeLadder
from lengthwise.plan.space.candidate import Candidate, reach_in_words
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft, strategy_of
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.placement import place
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.tune import fastest, tuning_batches

MOST_PHASES = 3
DEALS = 6
"""Deadlines to which a phase is dealt, the best of which is taken,"""
MOST_DEALT = 12_000
"""but no more than this many sequences in all."""
MOST_REMEMBERED = 64
"""Groupings whose placement is kept."""

Segment = tuple[int, int]
"""Buckets from one to another, the end left out."""


def prepare_inter(problem: PlanningProblem) -> "DcpPolicy":
    """DCP-inter: one number of recomputed layers for all sequences, the least under which the longest one fits.

    Raises:
        InfeasibleError: no candidates of one stage hold the longest sequence and tile the cluster.
    """
    return _fastest(problem, _of_fewest_recomputed)


def _of_fewest_recomputed(problem: PlanningProblem, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the candidates that recompute one number of layers, the least that suffices; all, if none does.

    There may be none that holds the longest sequence on degrees that tile the cluster.
    """
    for layers in sorted({candidate.scheme.num_recomputed for candidate in candidates}):
        candidates_of_level = [candidate for candidate in candidates if candidate.scheme.num_recomputed == layers]
        if _suffice(candidates_of_level, problem):
            return candidates_of_level
    return candidates


def prepare_intra(problem: PlanningProblem) -> "DcpPolicy":
    """DCP-intra: every micro-batch recomputes the fewest layers that fit.

    Raises:
        InfeasibleError: no candidates of one stage hold the longest sequence and tile the cluster.
    """
    return _fastest(problem, lambda _, candidates: candidates)


def _fastest(
    problem: PlanningProblem, choose: Callable[[PlanningProblem, Sequence[Candidate]], Sequence[Candidate]]
) -> "DcpPolicy":
    """The policy of all usable candidates, or of those that keep whole gradients, whichever is faster on the samples.

    Degrees and batch sizes are chosen bucket by bucket, by throughput, so that more candidates may make steps slower.
    """
    pools = [usable_candidates(problem)]
    if any(candidate.scheme.shard_gradients for candidate in pools[0]):
        with suppress(InfeasibleError):
            pools.append(usable_candidates(problem, shards_gradients=False))
    policies = [DcpPolicy(problem, tuple(choose(problem, pool))) for pool in pools]
    return policies[0] if len(policies) == 1 else fastest(policies, tuning_batches(problem))


def usable_candidates(problem: PlanningProblem, *, shards_gradients: bool = True) -> list[Candidate]:
    """The candidates of one stage with whole weights; of any weights, if those do not hold the longest sequence.

    ``shards_gradients``: also those that shard gradients.

    Raises:
        InfeasibleError: they do not either, or their degrees cannot tile the cluster.
    """
    single = [
        candidate
        for candidate in problem.candidates
        if candidate.num_stages == 1 and (shards_gradients or not candidate.scheme.shard_gradients)
    ]
    for usable in ([candidate for candidate in single if candidate.scheme.weights is WeightPlacement.WHOLE], single):
        if _suffice(usable, problem):
            return usable
    reach, advice = reach_in_words(single)
    raise InfeasibleError(
        f"dcp needs pipelines of one stage that hold {problem.max_length:,} tokens and tile {problem.num_devices} "
        f"devices of {bytes_in_words(problem.memory_bytes)}; {advice}",
        what="the longest sequence", value=problem.max_length, limit=reach, unit="tokens",
    )  # fmt: skip


def _suffice(candidates: Sequence[Candidate], problem: PlanningProblem) -> bool:
    """Whether some of the candidates hold the longest sequence beside others that tile the rest of the cluster."""
    tiling = Tiling([candidate.num_devices for candidate in candidates], problem.num_devices)
    return any(
        candidate.max_tokens >= problem.max_length and tiling.holds(candidate.num_devices) for candidate in candidates
    )


@dataclass(frozen=True, eq=False)
class DcpPolicy:
    """Data-centric parallel (DCP) planning over the candidates that it may use."""

    problem: PlanningProblem
    candidates: tuple[Candidate, ...]
    _idle: dict[tuple[int, ...], Phase] = field(default_factory=dict)

    @cached_property
    def tiling(self) -> Tiling:
        """How device groups can tile the cluster; its degrees are those of the types of group."""
        return Tiling([ladder.candidates[0].num_devices for ladder in self.ladders], self.problem.num_devices)

    @cached_property
    def ladders(self) -> tuple[RecomputeLadder, ...]:
        """The types of group, the lowest degree first: candidates that stand in for one another."""
        families: dict[object, list[Candidate]] = {}
        for candidate in self.candidates:
            families.setdefault(candidate.family, []).append(candidate)
        tiling = Tiling([candidate.num_devices for candidate in self.candidates], self.problem.num_devices)
        tiling_families = [candidates for candidates in families.values() if tiling.holds(candidates[0].num_devices)]
        return tuple(sorted(map(RecomputeLadder, tiling_families), key=lambda ladder: ladder.candidates[0].num_devices))

    @cached_property
    def buckets(self) -> LengthBuckets:
        """Ranges of lengths that run at one batch size and degree."""
        return make_buckets(self.problem, [limit for ladder in self.ladders for limit in ladder.limits.tolist()])

    @cached_property
    def bound(self) -> SearchSpaceBound:
        """The lower bound of all plans of the policy's candidates."""
        return SearchSpaceBound(self.problem, self.candidates, any_recompute=True)

    @cached_property
    def switch_s(self) -> float:
        """Estimated seconds between two phases: from groups of the lowest degree to those of the highest, or back."""
        strategies = []
        for order in (range(len(self.ladders)), range(len(self.ladders))[::-1]):
            types = self.tiling.fill(self.problem.num_devices, order)
            groups = tuple(types.count(candidate) for candidate in range(len(self.ladders)))
            strategies.append(strategy_of(self.idle_phase(groups), self.problem.num_devices))
        low, high = strategies
        return max(self.problem.cost.switch_s(low, high), self.problem.cost.switch_s(high, low))

    @property
    def name(self) -> str:
        """Degrees and recomputed layers that groups may have, as tables show them."""
        layers = sorted({candidate.scheme.num_recomputed for ladder in self.ladders for candidate in ladder.candidates})
        degrees = " ".join(str(degree) for degree in self.tiling.degrees)
        return f"groups of {degrees}, recomputing {' '.join(map(str, layers))} layers"

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan, bounded for all plans of the candidates the policy may use."""
        return DraftPlan(phases=self.phases(priced), lower_bound_s=self.bound_s(priced))

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The draft plan without its bound: one phase, or several where that is faster.

        Raises:
            InfeasibleError: a sequence is longer than every group holds.
        """
        longest = int(priced.lengths.argmax())
        if (length := int(priced.lengths[longest])) > max(ladder.max_tokens for ladder in self.ladders):
            raise InfeasibleError(
                f"sequence {priced.batch.ids[longest]} ({length:,} tokens) is longer than {Setting.MAX_LENGTH} "
                f"({self.problem.max_length:,}) and than any of dcp's groups holds; set {Setting.MAX_LENGTH} to the "
                "longest.",
                what=f"sequence {priced.batch.ids[longest]}", value=length, limit=self.problem.max_length,
                unit="tokens",
            )  # fmt: skip
        options = _Step(self, priced).options()
        if len(options) == 1:
            return options[0]
        return min(options, key=lambda phases: time_s(priced, DraftPlan(phases=phases)))

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the step takes at least; cheap."""
        return self.bound.floor_s(priced)

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that no plan of the policy's schemes beats."""
        return self.bound.step_s(priced)

    def idle_phase(self, groups: tuple[int, ...]) -> Phase:
        """Idle groups, as many of each type as given [K], type by type; high degrees are placed first."""
        if groups not in self._idle:
            if len(self._idle) >= MOST_REMEMBERED:
                self._idle.clear()
            wanted = [(self.ladders[k].candidates[0], groups[k]) for k in reversed(range(len(groups))) if groups[k]]
            placed = place(wanted, self.problem.num_devices, self.problem.devices_per_node)
            order = sorted(range(len(placed)), key=lambda index: self._type_of[placed[index][0]])
            self._idle[groups] = tuple(
                PipelineDraft(candidate=placed[index][0], ranks=placed[index][1]) for index in order
            )
        return self._idle[groups]

    @cached_property
    def _type_of(self) -> dict[Candidate, int]:
        return {ladder.candidates[0]: candidate for candidate, ladder in enumerate(self.ladders)}


class _Step:
    """One batch, and the phases it may be computed in: runs of buckets, the longest first."""

    def __init__(self, policy: DcpPolicy, priced: PricedBatch) -> None:
        self.policy, self.priced = policy, priced
        self.batch = BucketedBatch(priced, policy.buckets, policy.ladders)
        self._planners: dict[Segment, GroupPlanner] = {}

    def options(self) -> list[tuple[Phase, ...]]:
        """Phases worth comparing: the best in one phase, and the best in several if it promises to be faster."""
        whole_batch = (0, len(self.batch))
        options: list[tuple[Phase, ...]] = [(self._phase(whole_batch),)]
        best_s, best = self._planner(whole_batch).earliest[0], [whole_batch]
        splits = []
        for cuts in self._cuts():
            segments = list(pairwise((0, *cuts, len(self.batch))))
            switches_s = self.policy.switch_s * len(cuts)
            splits.append((sum(self._planner(segment).floor_s for segment in segments) + switches_s, segments))
        for floor_s, segments in sorted(splits):
            total_s = self._total_s(segments, floor_s, best_s)
            if total_s < best_s:
                best_s, best = total_s, segments
        return [*options, tuple(map(self._phase, best))] if len(best) > 1 else options

    def _total_s(self, segments: list[Segment], floor_s: float, limit_s: float) -> float:
        """Seconds of phases whose floors and switches take ``floor_s``; inf as soon as they cannot be below a limit."""
        for segment in segments:
            planner = self._planner(segment)
            room_s = limit_s - floor_s + planner.floor_s
            if room_s <= planner.floor_s or not planner.can_end_by(room_s):
                return np.inf
            floor_s += planner.earliest[0] - planner.floor_s
        return floor_s

    def _planner(self, segment: Segment) -> GroupPlanner:
        if segment not in self._planners:
            self._planners[segment] = GroupPlanner(self.batch.demand_of(*segment), self.policy.tiling)
        return self._planners[segment]

    def _cuts(self) -> list[tuple[int, ...]]:
        """Where phases may meet: between buckets that prefer different types of group."""
        types, degrees = range(len(self.policy.ladders)), self.policy.tiling.degrees
        preferred = [self.batch.cost_of(bucket, types, degrees).preferred[0] for bucket in range(len(self.batch))]
        places = (np.flatnonzero(np.diff(preferred)) + 1).tolist()
        return [cuts for number in range(1, MOST_PHASES) for cuts in combinations(places, number)]

    def _phase(self, segment: Segment) -> Phase:
        """Buckets of a segment on the groups of the earliest deadline, dealt to several deadlines."""
        planner, buckets = self._planner(segment), range(*segment)
        deadline_s, groups = planner.earliest
        types = [candidate for candidate, count in enumerate(groups) if count]
        costs = [self.batch.cost_of(bucket, types, self.policy.tiling.degrees) for bucket in buckets]
        low_s, best_s, best = planner.floor_s, np.inf, list[dict[int, list[int]]]()
        for attempt in range(max(2, min(DEALS, MOST_DEALT // int(self.batch.counts[slice(*segment)].sum())))):
            # The last is not filled up to a deadline but levelled, which is better where there are few sequences.
            dealer = Dealer(groups, 0.0 if attempt == DEALS - 1 else deadline_s)
            shares = [dealer.deal(bucket_costs) for bucket_costs in costs]
            if (ends_s := max(dealer.loads_s)) < best_s:
                best_s, best = ends_s, shares
            else:
                low_s = deadline_s
            deadline_s = (low_s + best_s) / 2
        packs: list[list[tuple[int, ...]]] = [[] for _ in dealer.types]
        for bucket, share in zip(buckets, best):
            positions, sizes = self.batch.positions(bucket), self.batch.batch_sizes[:, bucket].tolist()
            for group, jobs in share.items():
                packs[group] += evenly([positions[job] for job in jobs], sizes[dealer.types[group]])
        return self._pipelines(groups, packs)

    def _pipelines(self, groups: tuple[int, ...], packs: list[list[tuple[int, ...]]]) -> Phase:
        """The groups with their packs, each on the fastest candidate that holds it."""
        pipelines: list[PipelineDraft] = []
        idle = self.policy.idle_phase(groups)
        for count, ladder in zip(groups, self.policy.ladders):
            mine = range(len(pipelines), len(pipelines) + count)
            runs = iter(ladder.runs(self.priced, [pack for group in mine for pack in packs[group]]))
            for group in mine:
                candidate, runs_of_group = idle[group].candidate, tuple(islice(runs, len(packs[group])))
                runs_of_group = () if all(run is candidate for run in runs_of_group) else runs_of_group
                pipelines.append(
                    PipelineDraft(
                        candidate=candidate, ranks=idle[group].ranks, packs=tuple(packs[group]), runs=runs_of_group
                    )
                )
        return tuple(pipelines)
