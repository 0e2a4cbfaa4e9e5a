"""Candidate strategies for a corpus (Hydraulis, section 7), from the lengths of sampled batches.

Starting from homogeneous strategies and Eq. (4), fractional and whole, with and without the pipeline's bubble, a local
search exchanges pipelines on some of the samples, by estimates. What it finds is planned on the others, beside what it
has to beat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate
from lengthwise.plan.heterogeneous.propose.choose import StrategyComparison
from lengthwise.plan.heterogeneous.propose.estimate import Estimator
from lengthwise.plan.heterogeneous.propose.reduce import likely_equal, reduce_candidates
from lengthwise.plan.heterogeneous.propose.search import Search
from lengthwise.plan.heterogeneous.propose.starts import Starts, make_starts
from lengthwise.plan.heterogeneous.propose.tiling import Counts, Tiler, fillable, strategy_of
from lengthwise.plan.heterogeneous.propose.workload import make_workload
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.uniform.tune import tuning_batches

__all__ = ["Proposal", "propose", "reduce_candidates"]

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
    candidates = candidates or problem.candidates
    samples = problem.samples or [batch.lengths for batch in tuning_batches(problem)]
    limit = max(candidate.max_tokens for candidate in candidates)
    samples = [np.minimum(sample, limit) for sample in samples]
    holding = min(limit, max(problem.max_length, *(int(sample.max()) for sample in samples)))
    for used in fillable(candidates, problem.num_devices, holding=holding):
        part = problem if used == problem.num_devices else replace(problem, num_devices=used)
        if proposed := _propose(
            part, candidates, samples, holding=holding, max_strategies=max_strategies, effort=effort
        ):
            return proposed
    raise AssertionError("equal pipelines fill the last number of devices")


def _propose(
    problem: PlanningProblem,
    candidates: Sequence[ProposedCandidate],
    samples: Sequence[np.ndarray],
    *,
    holding: int,
    max_strategies: int,
    effort: int,
) -> list[Proposal]:
    """Strategies that fill all devices of ``problem``; none where no mix does."""
    seen, unseen = _split(samples, problem.num_devices)
    equal = likely_equal(problem, candidates, samples, holding=holding)
    candidates = reduce_candidates(candidates, np.append(np.concatenate(samples), holding), keep=equal)
    workload = make_workload(problem, candidates, samples)
    tiler = Tiler(workload, problem.devices_per_node)
    search = Search(Estimator(workload, problem.objective), tiler, seen)
    starts = make_starts(workload.part(seen), tiler, holding=holding)
    reached = _search(search, starts, holding=holding, effort=effort)
    if not reached:
        return []
    contest = StrategyComparison(problem, search, samples, unseen)
    always = [contest.fastest_of(starts.homogeneous), contest.fastest_of(reached[:1])]
    contest.beat(starts.published)
    always += [counts for counts in starts.published if counts in contest.times_s]
    max_steps = min(FEW_PLANS + 2 * problem.num_devices, MOST_PLANS, int(PLANNED_SEQUENCES / _mean_size(samples)))
    contest.enter([*reached, *search.ranked(holding=holding)[1 : 1 + RUNNERS_UP]], steps=max_steps)
    chosen = contest.choose(
        [counts for counts in dict.fromkeys(always) if counts is not None], max_strategies=max_strategies
    )
    return [Proposal(counts=strategy_of(candidates, counts), mean_s=mean_s) for counts, mean_s in chosen]


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
    """The best strategy found that holds ``holding`` tokens, if any, and others that complement those before them."""
    everything = (*starts.homogeneous, *starts.published, *starts.others)
    search.estimate(everything)
    if not search.ranked(holding=holding):
        search.tiler.may_cross = True
        search.estimate(everything)
    ranked = search.ranked(holding=holding)
    if not ranked:
        return []
    best_counts = [search.climb(ranked[0], holding=holding) if effort else ranked[0]]
    limits_s = search.times_s[best_counts[0]]
    for _ in range(effort - 1):
        start = search.ranked(limits_s)[0]
        reached = search.climb(start, limits_s)
        if search.mean_s(reached, limits_s) > float(limits_s[np.array(search.seen)].mean()) * (1 - ENOUGH):
            break
        limits_s = np.minimum(limits_s, search.times_s[reached])
        best_counts.append(reached)
    return best_counts
