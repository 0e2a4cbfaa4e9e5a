"""What users of Megatron-LM and DeepSpeed run: one homogeneous scheme and packs filled to the context length.

Every pipeline is dealt as many packs as any other, give or take one, whatever they cost: a pack of many short sequences
takes less time than one long sequence, since attention stays inside sequences.
"""

from collections.abc import Sequence

from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import EqualPipelines, Pack, fill, in_turn
from lengthwise.plan.uniform.tune import fastest, tiling_candidates, tuning_batches


def prepare(problem: PlanningProblem) -> EqualPipelines:
    """The scheme that is fastest on the problem's samples.

    Raises:
        InfeasibleError: no homogeneous scheme holds the longest sequence.
    """
    policies = [static(problem, candidate) for candidate in tiling_candidates(problem, policy="static")]
    return fastest(policies, tuning_batches(problem))


def static(problem: PlanningProblem, candidate: Candidate) -> EqualPipelines:
    """The policy with a given scheme."""
    return EqualPipelines(problem=problem, candidate=candidate, deal=_deal)


def _deal(priced: PricedBatch, candidate: Candidate, num_pipelines: int) -> Sequence[Sequence[Pack]]:
    return in_turn(fill(priced.batch.lengths, min(priced.problem.max_length, candidate.max_tokens)), num_pipelines)
