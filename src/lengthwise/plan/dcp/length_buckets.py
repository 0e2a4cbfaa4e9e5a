"""Buckets by length, found from typical lengths and from what device groups hold; nobody lists them by hand."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lengthwise.plan.space.problem import PlanningProblem

MOST_BUCKETS = 16
LEAST_RATIO = 2.0
"""Of the longest to the shortest length of a bucket, if that many buckets are enough."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthBuckets:
    """Ranges of lengths: bucket i holds those above ``edges[i - 1]``, up to ``edges[i]``."""

    edges: np.ndarray
    """Longest length of each bucket in tokens, rising. The first one is open below, the last one above."""

    def __len__(self) -> int:
        return len(self.edges)

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """The bucket of each length."""
        return np.searchsorted(self.edges[:-1], lengths)


def make_buckets(problem: PlanningProblem, limits: Iterable[int] = ()) -> LengthBuckets:
    """Buckets of about equal ratio, from the shortest length of the samples to the longest of the run.

    Args:
        problem: whose samples and ``max_length`` are covered.
        limits: most tokens of a micro-batch under each candidate; edges keep to them, so that a candidate holds all
            of a bucket or none, as far as limits are not much closer than buckets are wide.
    """
    longest = problem.max_length
    shortest = min((int(sample.min()) for sample in problem.samples if len(sample)), default=1)
    shortest = min(max(shortest, 1), longest)
    ratio = max(LEAST_RATIO, (longest / shortest) ** (1 / MOST_BUCKETS))
    geometric = longest / ratio ** np.arange(1, MOST_BUCKETS + 1)
    edges = [longest]
    for edge in [*sorted(limits, reverse=True), *geometric.astype(int).tolist()]:
        if shortest <= edge <= longest and all(max(edge / other, other / edge) > ratio**0.5 for other in edges):
            edges.append(int(edge))
    return LengthBuckets(edges=np.unique(edges))
