"""Packs instead of buckets at a fixed degree: filled to what memory holds, but some for every pipeline.

Balanced by tokens, not by time: each pack goes to the pipeline with the fewest tokens, the fullest pack first. How many
packs a pipeline has at least is tuned with the scheme: stages idle with few, overheads add up with many.
"""

from collections.abc import Sequence
from functools import partial

from lengthwise.plan.solve.makespan import longest_first
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import EqualPipelines, Pack, fill
from lengthwise.plan.uniform.tune import fastest, tiling_candidates, tuning_batches

ROUNDS = (1, 2, 4, 8, 16)
"""Packs of a pipeline at least, where sequences are short enough."""


def prepare(problem: PlanningProblem) -> EqualPipelines:
    """The scheme and packs per pipeline that are fastest on the problem's samples.

    Raises:
        InfeasibleError: no homogeneous scheme holds the longest sequence.
    """
    candidates = tiling_candidates(problem, policy="packed")
    policies = [packed(problem, candidate, rounds=rounds) for candidate in candidates for rounds in ROUNDS]
    return fastest(policies, tuning_batches(problem))


def packed(problem: PlanningProblem, candidate: Candidate, *, rounds: int = 1) -> EqualPipelines:
    """The policy with a given scheme and at least ``rounds`` packs per pipeline."""
    setting = f"{rounds} packs each" if rounds > 1 else ""
    return EqualPipelines(problem=problem, candidate=candidate, deal=partial(_deal, rounds=rounds), setting=setting)


def _deal(priced: PricedBatch, candidate: Candidate, num_pipelines: int, *, rounds: int) -> Sequence[Sequence[Pack]]:
    lengths = priced.batch.lengths
    share = -(-priced.batch.num_tokens // (num_pipelines * rounds))
    packs = fill(lengths, min(candidate.max_tokens, share))
    tokens = [float(sum(lengths[position] for position in pack)) for pack in packs]
    return [[packs[number] for number in numbers] for numbers in longest_first(tokens, num_pipelines)]
