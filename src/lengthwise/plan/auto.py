"""One search over packs, degrees, stages, methods, recompute, accumulation and phases; never slower than any policy.

The search space's families become adaptive pipelines, whose packs each run with the method and recompute that their
tokens allow. Heterogeneous strategies of them are proposed for the corpus. Per step the best is found by bounds first,
then two-phase splits are tried where the gap leaves room, then every other policy whose bound is below what was found.
Under costs whose error between plans is known, as measured ones, a plan of fewer phases and kinds of pipelines is taken
where the prediction that it is slower lies within that error.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from lengthwise.core.cost import error_of
from lengthwise.core.errors import LengthwiseError, first_line
from lengthwise.cost.overlapped import OverlappedCost
from lengthwise.plan.bounds.phase_cover import MOST_PHASES, certified_s
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.heterogeneous.adaptive_pipelines import (
    CandidateFamily,
    StrategyCounts,
    candidate_families,
    families_of,
    placed_strategy,
)
from lengthwise.plan.heterogeneous.draft_refinement import DraftRefinement, least_s
from lengthwise.plan.heterogeneous.fastest_runs import FastestRuns
from lengthwise.plan.heterogeneous.local_sequences import LocalSequences
from lengthwise.plan.heterogeneous.planned_moves import improved
from lengthwise.plan.heterogeneous.propose import Proposal, Proposer
from lengthwise.plan.heterogeneous.propose.beforehand import proposals
from lengthwise.plan.heterogeneous.small_steps import FEW_SEQUENCES, drafts_of_step
from lengthwise.plan.heterogeneous.strategy_candidates import SLACK, StrategyCandidates, StrategyPlan
from lengthwise.plan.heterogeneous.two_phase_split import SplitSearch, front_strategies
from lengthwise.plan.heterogeneous.two_stage_assignment import PlacedStrategy
from lengthwise.plan.layerwise.layer_assignment import mixed_candidates
from lengthwise.plan.layerwise.paradyse import on_every_degree
from lengthwise.plan.policies import POLICIES, Policy
from lengthwise.plan.policies import prepare as prepare_policy
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan
from lengthwise.plan.space.draft_times import step_times_s
from lengthwise.plan.space.parts import FEW_DEVICES, holding, main_parts, parts_of
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.shared_work import shared_work, work_shares
from lengthwise.plan.space.sliced_packs import counted_otherwise
from lengthwise.plan.space.smaller_packs import in_measured_packs
from lengthwise.plan.space.split_backwards import SplitBackwards, with_whole_backwards
from lengthwise.plan.uniform.tune import tuning_batches

TUNED = ("static", "packed", "hotspa")
"""Policies whose equal pipelines are strategies too."""
ENOUGH = 0.01
"""Gap to the bound at which no more is searched; where training waits for the plan, nothing more is tried."""
SEARCH_S, SEQUENCE_S, DEVICE_S = 0.06, 2e-4, 1e-4
"""About so many seconds a search for a step alone takes: for a pool, and for each sequence and device."""
SEARCH_SHARE, WAITED_SHARE = 1.1, 0.1
"""The share that searching may take of the seconds that the bound leaves to gain, and where training waits for it."""
PLANS_A_PART = 6
"""About so many strategies are planned in the time in which a part of the search space is searched."""
VERY_FEW_DEVICES = 64
"""Devices up to which strategies are proposed for the corpus of all parts of the search space, not the main ones alone.
"""
USELESS_PARTS, FASTER = 4, 1e-3
"""Parts in a row, none of whose strategies makes the average step faster by so much, after which no part is searched
for the corpus."""
WAITED_STRATEGIES, WAITED_SEQUENCES = (2, 4), 512
"""How many strategies of the corpus are planned at most where training waits, the most promising first: so many, and up
to so many while their plans assign fewer sequences than this."""
LEARNED_BATCHES, LEARNED_SEQUENCES = 4, 6000
"""Typical batches at most, and sequences of them all, whose plans tell which strategies of the corpus are promising."""
MOST_REFINED, NEARLY_FASTEST = 3, 1.04
"""Strategies at most that are looked at further, and how many times the seconds of the fastest one may take of them."""
SMALL_STEP_S, OTHERS_S = 0.01, 0.02
"""About the seconds of the search for a step of few sequences, and of trying every other policy."""
MOST_GAIN_S = 60.0
"""Most seconds to gain that count, as where there is no plan so far."""


def prepare(problem: PlanningProblem) -> "AutoPolicy":
    """Propose strategies and prepare every other policy for the corpus, that of layer-wise methods on every degree."""
    others: dict[str, Policy] = {}
    for name in POLICIES:
        if name != "auto":
            with _goes_on_without(name):
                others[name] = prepare_policy(name, problem)
    others |= {policy.name: policy for policy in on_every_degree(problem)}
    return AutoPolicy(problem, others)


class AutoPolicy:
    """The fastest plan that all moves together find."""

    def __init__(self, problem: PlanningProblem, others: dict[str, Policy]) -> None:
        self.candidates = (*problem.candidates, *mixed_candidates(problem))
        self.local = LocalSequences(problem.candidates if problem.local_sequences else ())
        self.problem = problem
        self.searched = (*self.candidates, *self.local.candidates, *counted_otherwise(problem.candidates))
        self.bound = SearchSpaceBound(problem, self.searched, any_recompute=True, in_any_order=True)
        self.runs = FastestRuns(self.candidates)
        self.refinement = DraftRefinement(self.runs, SplitBackwards(self.candidates), self.local)
        self.others = others
        self.parts = parts_of(problem.candidates)
        self.num_more_searches = int(with_whole_backwards(problem.candidates) != problem.candidates)
        """One with split backwards beside those without, where the search space has any."""
        families = [families_of(problem, part) for part in holding(self.parts, problem.max_length)]
        proposed = proposals(problem, candidate_families)
        if problem.num_devices <= FEW_DEVICES:
            parts = self.parts if problem.num_devices <= VERY_FEW_DEVICES else main_parts(problem.candidates)
            holding_parts = holding(parts, problem.max_length)
            of_parts = proposals_of_parts(Proposer(problem), problem, holding_parts, of_everything=proposed)
            proposed += while_faster(of_parts, beside=proposed)
        strategy_counts = list(dict.fromkeys([*(p.counts for p in proposed), *tuned_strategies(problem, others)]))
        strategies = [placed_strategy(problem, counts) for counts in strategy_counts]
        self.strategy_candidates = StrategyCandidates(strategies)
        if problem.is_waited_for:
            self.strategy_candidates.learn(_typical(problem))
        self.homogeneous = StrategyCandidates([s for s, counts in zip(strategies, strategy_counts) if len(counts) == 1])
        self.splits = SplitSearch(front_strategies(problem, families), self.strategy_candidates, self.bound)

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The fastest draft plan found, with the bound of the whole search space.

        Searches go by one that takes slices to begin with the longest micro-batch, which is tighter, and which none of
        their plans has been seen to beat.
        """
        bound_s = self.bound.step_s(priced)
        error = error_of(priced.problem.cost)
        margin = 1 + (error.of_ratios if error else 0.0)
        enough_s, is_waited_for = bound_s * (1 + ENOUGH), priced.problem.is_waited_for
        planned = _planned(self.strategy_candidates, priced, enough_s=enough_s if is_waited_for else None)
        drafts = _drafts_of(planned)
        if num_parts := _num_parts(priced, least_s(drafts) - bound_s):
            num_parts += self.num_more_searches
            drafts += _drafts_of(self._search(priced, num_parts, planned[:1]))
        if (best_s := least_s(drafts)) > enough_s and (not is_waited_for or _num_parts(priced, best_s - bound_s)):
            split, split_s = self.splits.best(priced, best_s)
            drafts += [] if split is None else [(split, split_s)]
        is_few, may_gain_s = len(priced.lengths) <= FEW_SEQUENCES, least_s(drafts) - bound_s
        if is_few and may_gain_s > bound_s * ENOUGH and _is_worth(priced, may_gain_s, SMALL_STEP_S):
            drafts += drafts_of_step(priced, self.candidates, self.runs, limit_s=least_s(drafts))
        if margin > 1:
            drafts += _drafts_of(_planned(self.homogeneous, priced))
        if priced.problem.lattice is not None or isinstance(priced.problem.cost, OverlappedCost):
            # the searches above see neither what fills packs up nor how much of an update passes can hide
            drafts = [(draft, sum(step_times_s(priced, draft))) for draft, _ in drafts]
        best_s = least_s(drafts)
        for name, policy in self.others.items():
            if (is_waited_for and best_s <= enough_s) or not _is_worth(priced, best_s - bound_s, OTHERS_S):
                break
            with _goes_on_without(name):
                if name in priced.drafted_by_policy or can_win(policy, priced, best_s * margin * (1 - SLACK)):
                    draft = priced.drafted_by_policy.get(name) or DraftPlan(phases=policy.phases(priced))
                    draft_s = sum(step_times_s(priced, draft))
                    drafts.append((draft, draft_s))
                    best_s = min(best_s, draft_s)
        assert drafts, "some policy holds every sequence that the search space holds"
        drafts = self.refinement.of(priced, drafts, bound_s, search_share=_search_share(priced))
        best, _ = min(_as_good(priced, drafts, margin - 1), key=simplest_first)
        proven_s = min(bound_s, self._bound_in_any_order.step_s(priced)) if self._has_slices else bound_s
        return DraftPlan(phases=in_measured_packs(priced, best, self.runs.of).phases, lower_bound_s=proven_s)

    def certified_s(self, priced: PricedBatch, draft: DraftPlan) -> float:
        """Seconds that no plan of one phase or two is faster than, slices in any order; in seconds to minutes.

        ``draft``: what this policy planned for the step. Of more phases, it is the bound of all plans.
        """
        bound = self._bound_in_any_order if self._has_slices else self.bound
        planned_s = sum(step_times_s(priced, draft))
        is_bounded = len(draft.phases) <= MOST_PHASES
        return certified_s(bound, priced, planned_s) if is_bounded else min(planned_s, bound.step_s(priced))

    @cached_property
    def _has_slices(self) -> bool:
        return any(candidate.scheme.slices > 1 for candidate in self.searched)

    @cached_property
    def _bound_in_any_order(self) -> SearchSpaceBound:
        """The bound of the search space, which does not take slices to begin with the longest micro-batch."""
        order = {"in_any_order": True, "slices_in_any_order": True}
        return SearchSpaceBound(self.problem, self.searched, any_recompute=True, **order)

    def _search(self, priced: PricedBatch, num_parts: int, planned: list[StrategyPlan]) -> list[StrategyPlan]:
        """The fastest of strategies that are proposed for this step alone, and one that moves from the fastest lead to.

        They are proposed of the search space and of its parts, of ``num_parts`` at most; not of those where a bound
        says that all are slower than what is ``planned``, the fastest so far, if there is one.
        """
        lengths, limit_s = priced.lengths, min((plan.time_s for plan in planned), default=np.inf)
        problem = replace(priced.problem, samples=(lengths,), max_length=int(lengths.max()))
        proposer, strategies = Proposer(problem, limit_s=limit_s), dict[StrategyCounts, PlacedStrategy]()
        for proposed in proposals_of_parts(proposer, problem, holding(self.parts, problem.max_length)):
            for proposal in proposed:
                if proposal.counts not in strategies:
                    strategies[proposal.counts] = placed_strategy(priced.problem, proposal.counts)
            if proposer.num_searches >= num_parts:
                break
        of_step = StrategyCandidates(list(strategies.values()))
        anew = _planned(of_step, priced)
        fastest = min((*planned, *anew), key=lambda plan: plan.time_s, default=None)
        if fastest is None:
            return []
        every = (*self.strategy_candidates.strategies, *of_step.strategies)
        return [*anew, improved(priced, fastest, every, most_plans=PLANS_A_PART * num_parts)]


def proposals_of_parts(
    proposer: Proposer,
    problem: PlanningProblem,
    parts: Sequence[tuple[Candidate, ...]],
    *,
    of_everything: Sequence[Proposal] = (),
) -> Iterator[list[Proposal]]:
    """Strategies of the search space, ``parts[0]``, unless given, and of its parts; not of those that have all that was
    proposed of a larger part, of everything or in between, as a search of them would find the same. Of those with
    whole backwards, and of these without slices, in any case, as few of others are looked at beside many.
    """
    if parts and not of_everything:
        yield (of_everything := proposer.propose(families_of(problem, parts[0])))
    unsplit = with_whole_backwards(parts[0]) if parts else ()
    searched: list[tuple[set[Candidate], Sequence[Proposal]]] = [(set(parts[0]), of_everything)] if parts else []
    for part in parts[1:]:
        members = set(part)
        is_whole = part in (unsplit, tuple([candidate for candidate in unsplit if candidate.scheme.slices == 1]))
        of_larger = (proposed for larger, proposed in searched if larger >= members)
        if is_whole or not any(all(members.issuperset(_members(k)) for k in proposed) for proposed in of_larger):
            yield (of_part := proposer.propose(families_of(problem, part)))
            searched += [(members, of_part)] if of_part else []


def while_faster(of_parts: Iterable[list[Proposal]], *, beside: Sequence[Proposal]) -> list[Proposal]:
    """Strategies of part after part until ``USELESS_PARTS`` in a row have none that is faster on the average step."""
    fastest_s, num_useless = min((proposal.mean_s for proposal in beside), default=np.inf), 0
    proposed: list[Proposal] = []
    for of_part in filter(None, of_parts):
        proposed += of_part
        part_s = min(proposal.mean_s for proposal in of_part)
        num_useless = 0 if part_s < fastest_s * (1 - FASTER) else num_useless + 1
        if num_useless == USELESS_PARTS:
            break
        fastest_s = min(fastest_s, part_s)
    return proposed


def _members(proposal: Proposal) -> list[Candidate]:
    """The candidates that the proposal's pipelines run packs as."""
    families = (family for family, _ in proposal.counts if isinstance(family, CandidateFamily))
    return [candidate for family in families for candidate in (family.pivot, *family.leaner)]


@contextmanager
def _goes_on_without(policy: str) -> Iterator[None]:
    """Leave out a policy that cannot hold the sequences, or that fails: then with a warning, for that is a fault."""
    try:
        yield
    except LengthwiseError:
        pass
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"policy auto goes on without policy {policy}, which fails: {reason}", stacklevel=3)


def tuned_strategies(problem: PlanningProblem, policies: Mapping[str, Policy]) -> list[StrategyCounts]:
    """The equal pipelines that policies were tuned to: their packs can be dealt better than these policies do."""
    candidates = {getattr(policies.get(name), "candidate", None): None for name in TUNED}
    return [
        ((candidate, problem.num_devices // candidate.num_devices),)
        for candidate in candidates
        if isinstance(candidate, Candidate)
    ]


def _typical(problem: PlanningProblem) -> list[PricedBatch]:
    """A few batches that are not too large to plan them under every strategy."""
    batches = tuning_batches(problem)[:LEARNED_BATCHES]
    num_sequences = accumulate(len(priced.lengths) for priced in batches)
    return [priced for priced, so_far in zip(batches, num_sequences) if so_far <= LEARNED_SEQUENCES]


def _num_parts(priced: PricedBatch, gain_s: float) -> int:
    """How many parts are worth searching for a step that may become ``gain_s`` seconds faster."""
    part_s = SEARCH_S + SEQUENCE_S * len(priced.lengths) + DEVICE_S * priced.problem.num_devices
    return int(_search_share(priced) * min(gain_s, MOST_GAIN_S) / part_s)


def _is_worth(priced: PricedBatch, gain_s: float, search_s: float) -> bool:
    """Whether to search for ``search_s`` seconds more where training waits, and a step may become ``gain_s`` faster."""
    return not priced.problem.is_waited_for or WAITED_SHARE * min(gain_s, MOST_GAIN_S) > search_s


def _search_share(priced: PricedBatch) -> float:
    """The seconds that a search may take of each that it may gain."""
    return WAITED_SHARE if priced.problem.is_waited_for else SEARCH_SHARE


def _planned(
    candidates: StrategyCandidates, priced: PricedBatch, *, enough_s: float | None = None
) -> list[StrategyPlan]:
    """The fastest of candidate strategies, planned, and those that may yet become faster; none where none holds all.

    With ``enough_s``, of the most promising few, the first that takes at most so long.
    """
    if enough_s is None:
        return candidates.fastest(priced, candidates.bounds_s(priced), most=MOST_REFINED, nearly=NEARLY_FASTEST)
    most_planned = int(np.clip(WAITED_SEQUENCES // len(priced.lengths), *WAITED_STRATEGIES))
    likely = candidates.likely_best(priced, enough_s=enough_s, most_planned=most_planned)
    return [] if likely is None else [likely]


def _drafts_of(planned: Sequence[StrategyPlan]) -> list[tuple[DraftPlan, float]]:
    """The draft plans of strategies and their seconds."""
    return [(DraftPlan(phases=(plan.phase,)), plan.time_s) for plan in planned]


def _as_good(
    priced: PricedBatch, drafts: Sequence[tuple[DraftPlan, float]], of_ratios: float
) -> list[tuple[DraftPlan, float]]:
    """The draft plans that are slower than the fastest by no more than the error of the difference.

    Of what both compute by the same kinds of schemes, prices are off alike; so ``of_ratios``, the error of the ratio of
    two unlike micro-batches, counts for the rest of their work.
    """
    fastest, best_s = min(drafts, key=lambda draft: draft[1])
    if not of_ratios:
        return [draft for draft in drafts if draft[1] <= best_s]
    work = work_shares(priced, fastest)

    def error_to(draft: DraftPlan) -> float:
        return of_ratios * (1 - shared_work(work, work_shares(priced, draft)))

    near = (draft for draft in drafts if draft[1] <= best_s * (1 + of_ratios))
    return [(draft, draft_s) for draft, draft_s in near if draft_s <= best_s * (1 + error_to(draft))]


def simplest_first(draft: tuple[DraftPlan, float]) -> tuple[int, int, float]:
    """Sort key of a draft plan and its seconds: phases, then kinds of pipelines, then seconds."""
    plan, time_s = draft
    kinds = {(pipeline.candidate.scheme.degree, pipeline.candidate.num_stages) for p in plan.phases for pipeline in p}
    return len(plan.phases), len(kinds), time_s


def can_win(policy: Policy, priced: PricedBatch, limit_s: float) -> bool:
    """Whether neither floor nor bound of the policy, the cheaper first, shows that it takes ``limit_s`` or more."""
    return policy.floor_s(priced) < limit_s and policy.bound_s(priced) < limit_s
