"""Hydraulis: candidate heterogeneous strategies from the corpus; per step the one that is best after assignment.

Its space is degree x stages with one method (tensor with sequence parallel where the search space has it) and no
recompute (section 4, Table 3), or as little as lets the longest sequence fit.
"""

from collections.abc import Sequence

from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.heterogeneous.adaptive_pipelines import placed_strategy
from lengthwise.plan.heterogeneous.propose.beforehand import proposals
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch


def prepare(problem: PlanningProblem) -> "HydraulisPolicy":
    """Propose strategies for the corpus.

    Raises:
        InfeasibleError: the longest sequence fits the search space, but no candidate of the published one.
    """
    candidates = published_space(problem)
    leanest = max(candidates, key=lambda candidate: candidate.max_tokens)
    if leanest.max_tokens < min(problem.max_length, problem.leanest.max_tokens):
        raise InfeasibleError(
            f"policy hydraulis plans with {leanest.scheme.methods[0]} alone: a sequence of {problem.max_length:,} "
            f"tokens {problem.needs(leanest, problem.max_length)} Set {Setting.POLICY}=auto, or "
            f"{Setting.MAX_LENGTH}={leanest.max_tokens} or less with {Setting.OVER_LENGTH}=split.",
            what="the longest sequence", value=problem.max_length, limit=leanest.max_tokens, unit="tokens",
        )  # fmt: skip
    strategies = [placed_strategy(problem, proposal.counts) for proposal in proposals(problem, published_space)]
    return HydraulisPolicy(
        StrategyCandidates(strategies), candidates, SearchSpaceBound(problem, candidates, any_recompute=True)
    )


class HydraulisPolicy:
    """The best of the candidates, by their bounds first."""

    def __init__(
        self, strategy_candidates: StrategyCandidates, candidates: Sequence[Candidate], bound: SearchSpaceBound
    ) -> None:
        self.strategy_candidates, self.candidates = strategy_candidates, candidates
        self.bound = bound

    @property
    def name(self) -> str:
        """Names of the candidate strategies, as tables show them."""
        return " | ".join(strategy.name for strategy in self.strategy_candidates.strategies)

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's fastest candidate; bounded for all strategies of the published space."""
        return DraftPlan(phases=self.phases(priced), lower_bound_s=self.bound.step_s(priced))

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The step's fastest candidate."""
        planned = self.strategy_candidates.best(priced, self.strategy_candidates.bounds_s(priced))
        assert planned is not None, "an unlimited search finds a plan"
        return (planned.phase,)

    def floor_s(self, priced: PricedBatch) -> float:
        """The bound of all candidates' candidates."""
        return self.bound.of(priced.bounding_lengths)

    def bound_s(self, priced: PricedBatch) -> float:
        """The least bound of all candidates."""
        return min(self.strategy_candidates.bounds_s(priced))


def published_space(problem: PlanningProblem) -> list[Candidate]:
    """Kinds of the published space; with offload and tiles, where the longest sequence does not fit without."""
    methods = {
        candidate.scheme.methods[0] for candidate in problem.candidates if len(set(candidate.scheme.methods)) == 1
    }
    method = Method.MEGATRON_TS if Method.MEGATRON_TS in methods else max(methods - {Method.DENSE}, default=None)
    space = [candidate for candidate in problem.candidates if set(candidate.scheme.methods) <= {Method.DENSE, method}]
    plain = [candidate for candidate in space if candidate.scheme.is_plain]
    for recomputed in sorted({candidate.scheme.num_recomputed for candidate in plain}):
        candidates = [candidate for candidate in plain if candidate.scheme.num_recomputed == recomputed]
        if max(candidate.max_tokens for candidate in candidates) >= problem.max_length:
            return candidates
    return space
