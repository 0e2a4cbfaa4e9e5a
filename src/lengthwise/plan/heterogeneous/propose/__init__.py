"""Candidate strategies for a corpus (Hydraulis, section 7), from the lengths of sampled batches.

Starting from homogeneous strategies and Eq. (4), fractional and whole, with and without the pipeline's bubble, a local
search exchanges pipelines on some of the samples, by estimates. What it finds is planned on the others, beside what it
has to beat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate
from lengthwise.plan.heterogeneous.propose.choose import OPTIMISM, StrategyComparison
from lengthwise.plan.heterogeneous.propose.estimate import Estimator
from lengthwise.plan.heterogeneous.propose.planned import PlannedSteps, price_steps
from lengthwise.plan.heterogeneous.propose.reduce import EqualPipelineEstimates, reduce_candidates
from lengthwise.plan.heterogeneous.propose.search import Search
from lengthwise.plan.heterogeneous.propose.starts import Starts, make_starts
from lengthwise.plan.heterogeneous.propose.tiling import Counts, Tiler, fillable, strategy_of
from lengthwise.plan.heterogeneous.propose.workload import make_workload
from lengthwise.plan.space.problem import PRICED_STEPS, PlanningProblem, PricedBatch
from lengthwise.plan.uniform.tune import tuning_batches

__all__ = ["Proposal", "Proposer", "propose", "reduce_candidates"]

FEW_SAMPLES = 8
"""Fewer samples than this are searched and checked on alike."""
CHECKED = 3
"""Every so many samples, one is kept for checking."""
FEWEST_CHECKED, CHECKED_SEQUENCES = 4, 16_000
"""Steps that are checked on at least, and sequences of all of them: more steps than that only if they are small."""
RUNNERS_UP = 3
"""Strategies planned after the fastest, by estimates of the average step."""
FEW_PLANS, MOST_PLANS, PLANNED_SEQUENCES = 8, 40, 100_000
"""Strategies times steps that are planned besides those that a promise needs, and sequences of all of them."""
ENOUGH = 1e-3
"""Relative gain of a search below which there is no further one."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A strategy: how many pipelines of each candidate. They fill the cluster; no stage crosses nodes needlessly."""

    counts: tuple[tuple[ProposedCandidate, int], ...]
    """The candidates that hold the longest sequences first."""
    mean_s: float
    """Planned seconds of the average step that the search has not seen; a step that the strategy cannot hold takes what
    it takes under the fastest proposal."""


def propose(
    problem: PlanningProblem,
    candidates: Sequence[ProposedCandidate] | None = None,
    *,
    max_strategies: int = 8,
    effort: int = 4,
) -> list[Proposal]:
    """Strategies one of which each step may use, the fastest first.

    Among them are the best homogeneous strategy, if one tiles the cluster, and one that holds ``problem.max_length``
    and all samples, or what the leanest candidate holds if that is less; and the whole strategies of Eq. (4), with
    bubble and without, unless planning the steps set aside proves that another proposal is faster there. Where no mix
    fills the cluster, they fill as much of it as one does.

    Args:
        problem: cluster, objective and samples of batches; without samples, one that is made up of its longest length.
        candidates: what strategies are made of; None: those of ``problem``.
        max_strategies: most strategies, at least 3.
        effort: local searches, each for what complements those before.
    """
    return Proposer(problem).propose(candidates or problem.candidates, max_strategies=max_strategies, effort=effort)


class Proposer:
    """Proposes strategies of one part of a search space after another: steps are planned under each strategy once."""

    def __init__(self, problem: PlanningProblem, *, limit_s: float = np.inf) -> None:
        """For the samples of ``problem``, of which no plan is of use that takes ``limit_s`` or longer."""
        self.problem, self.limit_s = problem, limit_s
        self.samples = problem.samples or [batch.lengths for batch in tuning_batches(problem)]
        self.num_searches = 0
        self._planned: dict[tuple[int, int], PlannedSteps] = {}
        self._estimates: dict[tuple[int, int], EqualPipelineEstimates] = {}
        self._searched: dict[tuple[object, ...], list[Proposal]] = {}

    def propose(
        self, candidates: Sequence[ProposedCandidate], *, max_strategies: int = 8, effort: int = 4
    ) -> list[Proposal]:
        """What :func:`propose` answers for ``candidates``; nothing where a bound says that all of it would be slower.

        Slower, that is, on each of the steps that are planned, than something that was planned for another part.
        """
        limit = max(candidate.max_tokens for candidate in candidates)
        samples = [np.minimum(sample, limit) for sample in self.samples]
        holding = min(limit, max(self.problem.max_length, *(int(sample.max()) for sample in samples)))
        for used in fillable(candidates, self.problem.num_devices, holding=holding):
            part = self.problem if used == self.problem.num_devices else replace(self.problem, num_devices=used)
            proposed = self._propose(
                part, candidates, samples, holding=holding, max_strategies=max_strategies, effort=effort
            )
            if proposed is not None:
                return proposed
        raise AssertionError("equal pipelines fill the last number of devices")

    def _propose(
        self,
        problem: PlanningProblem,
        candidates: Sequence[ProposedCandidate],
        samples: Sequence[np.ndarray],
        *,
        holding: int,
        max_strategies: int,
        effort: int,
    ) -> list[Proposal] | None:
        """Strategies that fill all devices of ``problem``; None where no mix does."""
        equal = self._equal(problem, samples).likely(candidates, holding=holding)
        candidates = reduce_candidates(candidates, np.append(np.concatenate(samples), holding), keep=equal)
        key = (problem.num_devices, holding, max_strategies, effort, *candidates)
        if key in self._searched:
            return self._searched[key]
        seen, unseen = _split(samples, problem.num_devices)
        workload = make_workload(problem, candidates, samples)
        planned = self._steps(problem, samples, unseen, holding)
        limits_s = np.minimum(planned.fastest_s, self.limit_s)
        if (workload.floors_s()[unseen] + workload.update_s.min() >= limits_s).all():
            return []
        self.num_searches += 1
        tiler = Tiler(workload, problem.devices_per_node)
        search = Search(Estimator(workload, problem.objective), tiler, seen)
        starts = make_starts(workload.part(seen), tiler, holding=holding)
        reached = _search(search, starts, holding=holding, effort=min(1, effort))
        if not reached:
            return None
        if (search.fastest_s[unseen] * OPTIMISM >= limits_s).all():
            return []
        reached = _complemented(search, reached, effort=effort)
        self._searched[key] = [
            Proposal(counts=strategy_of(candidates, counts), mean_s=mean_s)
            for counts, mean_s in _chosen(
                StrategyComparison(search, planned, unseen),
                starts,
                [*reached, *search.ranked(holding=holding)[1 : 1 + RUNNERS_UP]],
                max_steps=min(
                    FEW_PLANS + 2 * problem.num_devices, MOST_PLANS, int(PLANNED_SEQUENCES / _mean_size(samples))
                ),
                max_strategies=max_strategies,
            )
        ]
        return self._searched[key]

    def _equal(self, problem: PlanningProblem, samples: Sequence[np.ndarray]) -> EqualPipelineEstimates:
        """Estimates of equal pipelines on the samples, cut to what some candidates hold."""
        key = problem.num_devices, max(int(sample.max()) for sample in samples)
        if key not in self._estimates:
            self._estimates[key] = EqualPipelineEstimates(problem, samples)
        return self._estimates[key]

    def _steps(
        self, problem: PlanningProblem, samples: Sequence[np.ndarray], steps: Sequence[int], holding: int
    ) -> PlannedSteps:
        """The steps that strategies are compared on, cut to what the candidates hold."""
        key = problem.num_devices, min(holding, max(int(sample.max()) for sample in samples))
        if key not in self._planned:
            shared: dict[object, list[PricedBatch]] = problem.once(PRICED_STEPS, dict)
            if (*key, *steps) not in shared:
                shared[(*key, *steps)] = price_steps(problem, [samples[step] for step in steps])
            self._planned[key] = PlannedSteps(problem, shared[(*key, *steps)])
        return self._planned[key]


def _chosen(
    contest: StrategyComparison, starts: Starts, reached: Sequence[Counts], *, max_steps: int, max_strategies: int
) -> list[tuple[Counts, float]]:
    """What is fastest after planning, of what was ``reached`` and of what that has to beat, and the mean seconds."""
    always = [contest.fastest_of(starts.homogeneous), contest.fastest_of(reached[:1])]
    contest.beat(starts.published)
    always += [counts for counts in starts.published if counts in contest.times_s]
    contest.enter(reached, steps=max_steps)
    return contest.choose(
        [counts for counts in dict.fromkeys(always) if counts is not None], max_strategies=max_strategies
    )


def _split(samples: Sequence[np.ndarray], num_devices: int) -> tuple[list[int], list[int]]:
    """Steps to search on and steps to check on, fewer of them where devices are few or steps are large."""
    every = list(range(len(samples)))
    num_checked = max(FEWEST_CHECKED, min(num_devices // 8, int(CHECKED_SEQUENCES / _mean_size(samples))))
    if len(samples) < FEW_SAMPLES:
        return every, every[:num_checked]
    unseen = every[CHECKED - 1 :: CHECKED][:num_checked]
    return [step for step in every if step not in unseen], unseen


def _mean_size(samples: Sequence[np.ndarray]) -> float:
    """Sequences of the average step."""
    return sum(map(len, samples)) / len(samples)


def _search(search: Search, starts: Starts, *, holding: int, effort: int) -> list[Counts]:
    """The best strategy found that holds ``holding`` tokens, if any; searched for if there is any ``effort``."""
    everything = (*starts.homogeneous, *starts.published, *starts.others)
    search.estimate(everything)
    if not search.ranked(holding=holding):
        search.tiler.may_cross = True
        search.estimate(everything)
    ranked = search.ranked(holding=holding)
    if not ranked:
        return []
    return [search.climb(ranked[0], holding=holding) if effort else ranked[0]]


def _complemented(search: Search, reached: Sequence[Counts], *, effort: int) -> list[Counts]:
    """``reached``, and others that complement those before them: ``effort`` in all at most."""
    best_counts, limits_s = list(reached), search.times_s[reached[0]]
    for _ in range(effort - 1):
        start = search.ranked(limits_s)[0]
        reached_next = search.climb(start, limits_s)
        if search.mean_s(reached_next, limits_s) > float(limits_s[np.array(search.seen)].mean()) * (1 - ENOUGH):
            break
        limits_s = np.minimum(limits_s, search.times_s[reached_next])
        best_counts.append(reached_next)
    return best_counts
