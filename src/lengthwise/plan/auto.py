"""One search over packs, degrees, stages, methods, recompute, accumulation and phases; never slower than any policy.

The search space's families become adaptive pipelines, whose packs each run with the method and recompute that their
tokens allow. Heterogeneous strategies of them are proposed for the corpus. Per step the best is found by bounds first,
then two-phase splits are tried where the gap leaves room, then every other policy whose bound is below what was found.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.heterogeneous.adaptive_pipelines import (
    CandidateFamily,
    ProposedCandidate,
    candidate_families,
    tile_of,
)
from lengthwise.plan.heterogeneous.propose.beforehand import proposals
from lengthwise.plan.heterogeneous.strategy_candidates import SLACK, StrategyCandidates
from lengthwise.plan.heterogeneous.two_phase_split import SplitSearch
from lengthwise.plan.heterogeneous.two_stage_assignment import PlacedStrategy
from lengthwise.plan.layerwise.layer_assignment import mixed_candidates
from lengthwise.plan.policies import POLICIES, Policy
from lengthwise.plan.policies import prepare as prepare_policy
from lengthwise.plan.space.draft_plan import DraftPlan, step_times_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

ENOUGH = 0.01
"""Gap to the bound at which splits are not tried."""


def prepare(problem: PlanningProblem) -> "AutoPolicy":
    """Propose strategies and prepare every other policy for the corpus."""
    others = {}
    for name in POLICIES:
        if name != "auto":
            with suppress(Exception):  # a policy that cannot hold the corpus, or fails, cannot win
                others[name] = prepare_policy(name, problem)
    return AutoPolicy(problem, others)


class AutoPolicy:
    """The fastest plan that all moves together find."""

    def __init__(self, problem: PlanningProblem, others: dict[str, Policy]) -> None:
        self.bound = SearchSpaceBound(problem, (*problem.candidates, *mixed_candidates(problem)))
        self.others = others
        candidates = candidate_families(problem)
        proposed = proposals(problem, candidate_families)
        self.strategy_candidates = StrategyCandidates([_placed(problem, proposal.counts) for proposal in proposed])
        self.splits = SplitSearch(_fronts(problem, candidates), self.strategy_candidates, self.bound)

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The fastest draft plan found, with the bound of the whole search space."""
        bound_s = self.bound.step_s(priced)
        phase, best_s = self.strategy_candidates.best(priced, self.strategy_candidates.bounds_s(priced))
        best = None if phase is None else DraftPlan(phases=(phase,))
        if best_s > bound_s * (1 + ENOUGH):
            split, split_s = self.splits.best(priced, best_s)
            best, best_s = (split, split_s) if split is not None else (best, best_s)
        if best is not None and priced.problem.lattice is not None:
            best_s = sum(step_times_s(priced, best))  # the searches above do not see what fills packs up
        for name, policy in self.others.items():
            with suppress(Exception):  # one that fails on this step cannot win it
                if name in priced.drafted_by_policy or can_win(policy, priced, best_s * (1 - SLACK)):
                    draft = priced.drafted_by_policy.get(name) or DraftPlan(phases=policy.phases(priced))
                    draft_s = sum(step_times_s(priced, draft))
                    best, best_s = (draft, draft_s) if draft_s < best_s else (best, best_s)
        assert best is not None, "some policy holds every sequence that the search space holds"
        return DraftPlan(phases=best.phases, lower_bound_s=bound_s)


def can_win(policy: Policy, priced: PricedBatch, limit_s: float) -> bool:
    """Whether neither floor nor bound of the policy, the cheaper first, shows that it takes ``limit_s`` or more."""
    return policy.floor_s(priced) < limit_s and policy.bound_s(priced) < limit_s


def _placed(problem: PlanningProblem, counts: Sequence[tuple[ProposedCandidate, int]]) -> PlacedStrategy:
    return PlacedStrategy(problem, [tile_of(candidate, count) for candidate, count in counts])


def _fronts(problem: PlanningProblem, candidates: list[CandidateFamily]) -> list[PlacedStrategy]:
    """For each degree of one stage that tiles the cluster, the family that computes the longest sequence fastest."""
    longest = np.array([problem.max_length])
    best: dict[int, CandidateFamily] = {}
    for candidate in candidates:
        if (
            candidate.num_stages > 1
            or problem.num_devices % candidate.num_devices
            or candidate.max_tokens < problem.max_length
        ):
            continue
        fastest = best.get(candidate.num_devices)
        if fastest is None or candidate.times_s(longest)[0] < fastest.times_s(longest)[0]:
            best[candidate.num_devices] = candidate
    return [_placed(problem, ((candidate, problem.num_devices // size),)) for size, candidate in sorted(best.items())]
