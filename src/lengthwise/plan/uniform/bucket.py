"""Bucket parallel: a fixed degree, buckets by length, a batch size per bucket (Esser et al. 2024; baseline of DCP).

Bucket k holds lengths up to ``longest / 2^k``. Its batch size is chosen by cost so that a full micro-batch of any
bucket takes about as long: ``floor(budget / time of its longest length)``, at least one sequence and no more than
memory holds. A micro-batch is of one bucket, its sequences in the sampler's order. Here it is packed, not padded to
the bucket's edge, which is the friendlier reading.

In every round of accumulation each pipeline takes one micro-batch; all pipelines have as many, give or take one.
Pipelines of one round may hold different buckets, and the longest bucket often cannot be cut to the budget: that is
the imbalance DCP removes. A large budget gives few, full micro-batches, a small one many that balance; it is tuned.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import EqualPipelines, Pack, in_turn
from lengthwise.plan.uniform.tune import fastest, tiling_candidates, tuning_batches

BUDGETS = tuple(2.0**power for power in range(-6, 5))
"""Of the time of the longest sequence of the run."""


def prepare(problem: PlanningProblem) -> EqualPipelines:
    """The scheme and budget that are fastest on the problem's samples.

    Raises:
        InfeasibleError: no homogeneous scheme holds the longest sequence.
    """
    batches = tuning_batches(problem)
    edges = bucket_edges(problem, shortest=min(int(priced.lengths.min()) for priced in batches))
    policies = []
    for candidate in tiling_candidates(problem, policy="bucket"):
        all_sizes = dict.fromkeys(_batch_sizes(candidate, edges, BUDGETS))
        policies += [bucket(problem, candidate, edges=edges, sizes=sizes) for sizes in all_sizes]
    return fastest(policies, batches)


def bucket(
    problem: PlanningProblem, candidate: Candidate, *, edges: tuple[int, ...], sizes: tuple[int, ...]
) -> EqualPipelines:
    """The policy with a given scheme, longest lengths of the buckets (descending) and batch sizes."""
    setting = f"{sizes[0]} to {sizes[-1]} sequences each"
    return EqualPipelines(
        problem=problem, candidate=candidate, deal=partial(_deal, edges=np.array(edges), sizes=sizes), setting=setting
    )


def bucket_edges(problem: PlanningProblem, *, shortest: int) -> tuple[int, ...]:
    """Longest length of each bucket: halves of the longest of the run, down to the bucket of ``shortest``."""
    edges = [problem.max_length]
    while edges[-1] // 2 >= shortest:
        edges.append(edges[-1] // 2)
    return tuple(edges)


def batch_sizes(candidate: Candidate, edges: tuple[int, ...], *, budget: float) -> tuple[int, ...]:
    """Sequences of a micro-batch of each bucket, whose time is to be ``budget`` times that of the longest length."""
    return _batch_sizes(candidate, edges, [budget])[0]


def _batch_sizes(candidate: Candidate, edges: tuple[int, ...], budgets: Sequence[float]) -> list[tuple[int, ...]]:
    """The :func:`batch_sizes` of each budget."""
    lengths = np.array(edges)
    times_s = candidate.times_s(lengths)
    fitting = np.maximum(1, candidate.max_tokens // lengths)
    wanted = np.maximum(1, np.floor(np.array(budgets)[:, None] * times_s[0] / times_s))
    return list(map(tuple, np.minimum(fitting, wanted).astype(int).tolist()))


def _deal(
    priced: PricedBatch, candidate: Candidate, num_pipelines: int, *, edges: np.ndarray, sizes: tuple[int, ...]
) -> Sequence[Sequence[Pack]]:
    packs: list[Pack] = []
    numbers = np.searchsorted(-edges, -priced.lengths, side="right") - 1
    for number, size in enumerate(sizes):
        positions = np.flatnonzero(np.maximum(numbers, 0) == number).tolist()
        packs += [tuple(positions[start : start + size]) for start in range(0, len(positions), size)]
    return in_turn(packs, num_pipelines)
