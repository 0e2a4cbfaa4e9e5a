"""What users of Megatron-LM and DeepSpeed run: one homogeneous scheme and packs filled to the context length.

Every pipeline is dealt as many packs as any other, give or take one, whatever they cost: a pack of many short sequences
takes less time than one long sequence, since attention stays inside sequences.
"""

from collections.abc import Sequence

from lengthwise.plan.homogeneous import Homogeneous, Pack, fill, in_turn
from lengthwise.plan.kind import Kind
from lengthwise.plan.problem import PricedBatch, Problem
from lengthwise.plan.tune import fastest, tiling_kinds, tuning_batches


def prepare(problem: Problem) -> Homogeneous:
    """The scheme that is fastest on the problem's samples.

    Raises:
        InfeasibleError: no homogeneous scheme holds the longest sequence.
    """
    policies = [static(problem, kind) for kind in tiling_kinds(problem, policy="static")]
    return fastest(policies, tuning_batches(problem))


def static(problem: Problem, kind: Kind) -> Homogeneous:
    """The policy with a given scheme."""
    return Homogeneous(problem=problem, kind=kind, deal=_deal)


def _deal(priced: PricedBatch, kind: Kind, num_pipelines: int) -> Sequence[Sequence[Pack]]:
    return in_turn(fill(priced.batch.lengths, min(priced.problem.max_length, kind.max_tokens)), num_pipelines)
