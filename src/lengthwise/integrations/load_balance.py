"""Sequences dealt to ranks that compute each alone, for loops that are not ours: balanced without a profile."""

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.makespan import longest_first

EQUAL_AT = 16_384
"""Tokens of a sequence whose attention takes as long as all else: about twelve times the model's hidden size."""


def work_of(lengths: np.ndarray, *, equal_at: int = EQUAL_AT) -> np.ndarray:
    """What sequences take, in tokens: l + l^2 / ``equal_at``."""
    length = np.asarray(lengths, dtype=np.float64)
    return length * (1.0 + length / equal_at)


def deal(
    batch: GlobalBatch, num_ranks: int, *, max_tokens: int, equal_at: int = EQUAL_AT
) -> list[list[tuple[int, ...]]]:
    """Deal sequences to ranks, in micro-batches of at most ``max_tokens``, so that all have about the same work."""
    lengths = np.array(batch.lengths, dtype=np.int64)
    dealt = []
    for numbers in longest_first(work_of(lengths, equal_at=equal_at).tolist(), num_ranks):
        packs = first_fit_decreasing([batch.lengths[number] for number in numbers], max_tokens)
        dealt.append([tuple(batch.ids[numbers[number]] for number in pack) for pack in packs])
    return dealt
