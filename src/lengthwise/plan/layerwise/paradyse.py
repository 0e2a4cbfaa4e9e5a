"""ParaDySe: one fixed group of devices computes every pack, each layer by the method that suits the pack's length.

The group is a node, or what of it the search space has a degree for; copies of it tile the cluster. Weights are sharded
where the search space has such methods, so that layers switch between them at no cost. Packs are filled to the context
length or to what the method of the greatest throughput holds, and spread over the copies longest first; each runs as
the fastest mix of methods that holds it (``lengthwise.plan.layerwise.layer_assignment``). Packs
of like sizes run the same mix while it is within ``smoothing`` of the best (``plan.smoothing``, the paper's gamma).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.pipeline_config import WeightPlacement
from lengthwise.core.wording import bytes_in_words
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.dcp.recompute_levels import RecomputeLadder
from lengthwise.plan.layerwise.layer_assignment import LayerAssigner, options_of, steady_choices
from lengthwise.plan.solve.shop import Machines, schedule
from lengthwise.plan.space.candidate import Candidate, reach_in_words
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft
from lengthwise.plan.space.placement import place
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

SIZE_RATIO = 2**0.0625
"""Of neighbouring numbers of tokens for which the steady mix is chosen."""


def prepare(problem: PlanningProblem) -> "ParaDysePolicy":
    """The group of the largest degree within a node that tiles the cluster, and the mixes it may run.

    If that does not hold the longest sequence of the run, the smallest larger one that does.

    Raises:
        InfeasibleError: no degree that tiles the cluster holds the longest sequence in one stage.
    """
    for candidates in _groups(problem):
        policy = ParaDysePolicy(problem, _ladder(candidates))
        if policy.ladder.max_tokens >= problem.max_length:
            return policy
    single = [candidate for candidate in problem.candidates if candidate.num_stages == 1]
    reach, advice = reach_in_words(single)
    raise InfeasibleError(
        f"paradyse needs one degree that tiles {problem.num_devices} devices and holds {problem.max_length:,} tokens "
        f"in {bytes_in_words(problem.memory_bytes)}; {advice}",
        what="the longest sequence", value=problem.max_length, limit=reach, unit="tokens",
    )  # fmt: skip


def on_every_degree(problem: PlanningProblem) -> list["ParaDysePolicy"]:
    """Make a policy for copies of every family that tiles the cluster, whatever length it holds."""
    tiling = [
        candidates
        for (degree, layers, *_), candidates in problem.families.items()
        if len(layers) == 1 and problem.num_devices % degree == 0
    ]
    return [ParaDysePolicy(problem, _ladder(candidates)) for candidates in tiling]


def _ladder(candidates: Sequence[Candidate]) -> RecomputeLadder:
    mixes = LayerAssigner(candidates).mixes() if len(options_of(candidates)) > 1 else ()
    return RecomputeLadder([*candidates, *mixes])


def _groups(problem: PlanningProblem) -> list[Sequence[Candidate]]:
    """Families that tile the cluster, in the order of preference: sharded weights come first at each degree."""
    candidates_of = {
        (family[0], family[2]): candidates
        for family, candidates in problem.families.items()
        if len(family[1]) == 1 and problem.num_devices % family[0] == 0
    }
    degrees = sorted({degree for degree, _ in candidates_of})
    inside = [degree for degree in degrees if degree <= problem.devices_per_node][-1:]
    order = inside + [degree for degree in degrees if degree > problem.devices_per_node]
    return [
        candidates_of[degree, weights]
        for degree in order
        for weights in (WeightPlacement.SHARDED, WeightPlacement.WHOLE)
        if (degree, weights) in candidates_of
    ]


@dataclass(frozen=True, eq=False)
class ParaDysePolicy:
    """ParaDySe planning on copies of one group of devices."""

    problem: PlanningProblem
    ladder: RecomputeLadder
    """The candidates a pack may run as, mixes of methods among them."""

    @property
    def num_copies(self) -> int:
        """Groups side by side."""
        return self.problem.num_devices // self.ladder.candidates[0].num_devices

    @property
    def name(self) -> str:
        """Copies, degree and methods, as tables show them."""
        methods = "+".join(
            dict.fromkeys(method for candidate in self.ladder.candidates for method in candidate.scheme.methods)
        )
        return f"{self.num_copies} x <{self.ladder.candidates[0].scheme.degree},1> {methods} by layer"

    @cached_property
    def bound(self) -> SearchSpaceBound:
        """The lower bound of all plans of the candidates a pack may run as."""
        return SearchSpaceBound(self.problem, self.ladder.candidates)

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan, bounded for all plans of the candidates the policy may use."""
        return DraftPlan(phases=self.phases(priced), lower_bound_s=self.bound_s(priced))

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the step takes at least; cheap."""
        return self.bound.floor_s(priced)

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that no plan of the policy's schemes beats."""
        return self.bound.step_s(priced)

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The draft plan without its bound: one phase.

        Raises:
            InfeasibleError: a sequence is longer than the group holds.
        """
        longest = int(priced.lengths.argmax())
        if (length := int(priced.lengths[longest])) > self.ladder.max_tokens:
            raise InfeasibleError(
                f"sequence {priced.batch.ids[longest]} ({length:,} tokens) is longer than {Setting.MAX_LENGTH} "
                f"({self.problem.max_length:,}) and than the {self.ladder.max_tokens:,} tokens that paradyse's group "
                f"holds; set {Setting.MAX_LENGTH} to the longest.",
                what=f"sequence {priced.batch.ids[longest]}", value=length, limit=self.ladder.max_tokens,
                unit="tokens",
            )  # fmt: skip
        return (tuple(self._pipeline(priced, ranks, packs) for ranks, packs in zip(self._ranks, self._packs(priced))),)

    @cached_property
    def _ranks(self) -> list[tuple[int, ...]]:
        placed = place(
            [(self.ladder.candidates[0], self.num_copies)], self.problem.num_devices, self.problem.devices_per_node
        )
        return [ranks for _, ranks in placed]

    @cached_property
    def _steady(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of tokens, rising to the most that fit, and the mix of packs of up to so many."""
        max_tokens = self.ladder.max_tokens
        steps = int(np.ceil(np.log(max_tokens) / np.log(SIZE_RATIO)))
        sizes = np.unique(np.geomspace(1, max_tokens, steps + 1).round().astype(np.int64))
        times_s = np.stack([candidate.times_s(sizes) + candidate.overhead_s for candidate in self.ladder.candidates])
        times_s[sizes > self.ladder.limits[:, None]] = np.inf
        return sizes, np.array(steady_choices(times_s, ratio=self.problem.smoothing))

    def _levels(self, times_s: np.ndarray, tokens: np.ndarray) -> list[int]:
        """The steady mix of each pack's size where it is near enough to the pack's fastest, else the fastest."""
        sizes, choices = self._steady
        steady = choices[np.searchsorted(sizes, tokens)]
        steady_s = times_s[steady, np.arange(len(tokens))]
        near = steady_s <= (1 + self.problem.smoothing) * times_s.min(axis=0)
        return np.where(near, steady, times_s.argmin(axis=0)).tolist()

    def _packs(self, priced: PricedBatch) -> list[tuple[tuple[int, ...], ...]]:
        """Pack each copy's sequences for the candidate of highest throughput; a sequence that exceeds it is alone."""
        order = np.argsort(-priced.lengths, kind="stable")
        lengths = priced.lengths[order]
        level = self._pivot(priced)
        pivot, capacity = self.ladder.candidates[level], min(int(self.ladder.limits[level]), self.problem.max_length)
        work_s = priced.times_s(pivot)[order].copy()
        alone = np.flatnonzero(lengths > capacity)
        if len(alone):
            runs = self.ladder.runs(priced, [(position,) for position in order[alone].tolist()])
            for number, (position, run) in enumerate(zip(order[alone].tolist(), runs)):
                work_s[number] = priced.times_s(run)[position] + priced.overhead_s(run) - priced.overhead_s(pivot)
            # A sequence that is alone may be faster than a shorter one in the pivot's packs; the scheduler wants order.
            work_s[: len(alone) + 1] = np.maximum.accumulate(work_s[: len(alone) + 1][::-1])[::-1]
        machines = Machines(count=self.num_copies, setup=priced.overhead_s(pivot), capacity=capacity)
        assignment = schedule(
            work_s[None, :], np.minimum(lengths, capacity), [machines], objective=self.problem.objective
        )
        return [tuple(tuple(order[list(pack)].tolist()) for pack in packs) for packs in assignment.batches]

    def _pivot(self, priced: PricedBatch) -> int:
        """The index of the candidate that would run the batch fastest, with leaner ones for what it does not hold."""
        tokens = int(priced.lengths.sum())
        estimates_s = []
        for level, candidate in enumerate(self.ladder.candidates):
            times_s, fits = priced.times_s(candidate), priced.lengths <= self.ladder.limits[level]
            capacity = min(int(self.ladder.limits[level]), self.problem.max_length)
            estimate_s = float(times_s.sum()) + priced.overhead_s(candidate) * max(1.0, tokens / capacity)
            estimates_s.append(estimate_s if fits.any() else np.inf)
        return int(np.argmin(estimates_s))

    def _pipeline(
        self, priced: PricedBatch, ranks: tuple[int, ...], packs: tuple[tuple[int, ...], ...]
    ) -> PipelineDraft:
        leanest = self.ladder.candidates[0]
        if not packs:
            return PipelineDraft(candidate=leanest, ranks=ranks)
        starts = np.cumsum([0, *map(len, packs)])[:-1]
        flat = np.concatenate(packs)
        tokens = np.add.reduceat(priced.lengths[flat], starts)
        times_s = np.stack(
            [
                np.add.reduceat(priced.times_s(candidate)[flat], starts) + priced.overhead_s(candidate)
                for candidate in self.ladder.candidates
            ]
        )
        times_s[tokens > self.ladder.limits[:, None]] = np.inf
        order = np.argsort(-times_s.min(axis=0), kind="stable")  # packs are issued by decreasing time
        runs = tuple(self.ladder.candidates[level] for level in self._levels(times_s[:, order], tokens[order]))
        return PipelineDraft(
            candidate=leanest,
            ranks=ranks,
            packs=tuple(packs[pack] for pack in order.tolist()),
            runs=() if all(run is leanest for run in runs) else runs,
        )
