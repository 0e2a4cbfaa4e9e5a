from dataclasses import dataclass

import numpy as np
import pytest

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.scheme import dense_scheme
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import find_policy


@dataclass(frozen=True)
class SimpleCost:
    """T = a l^2 + b l, c per micro-batch, one byte per token; small enough to check by hand."""

    a_s: float = 1e-4
    b_s: float = 1e-2
    c_s: float = 0.5
    capacity: int = 1000

    def sequence_times_s(self, lengths, scheme):
        return (self.a_s * np.asarray(lengths, dtype=float) + self.b_s) * lengths

    def overhead_s(self, scheme):
        return self.c_s

    def time_s(self, lengths, scheme):
        return float(self.sequence_times_s(np.asarray(lengths), scheme).sum()) + self.c_s

    def update_s(self, strategy):
        return 0.25

    def peak_bytes(self, num_tokens, scheme, *, num_devices):
        return num_tokens * 2**30

    def max_tokens(self, scheme, *, num_devices):
        return self.capacity


@pytest.fixture
def planner():
    def make(policy="balanced", *, num_devices=4, max_length=100, cost=None, **options):
        cost = cost or SimpleCost()
        return Planner(
            policy=policy,
            arrange=find_policy(policy),
            cost=cost,
            scheme=dense_scheme(2),
            num_devices=num_devices,
            memory_bytes=cost.capacity * 2**30,
            max_length=max_length,
            **options,
        )

    return make


@pytest.fixture
def batch():
    return lambda lengths: GlobalBatch(step=0, ids=tuple(range(10, 10 + len(lengths))), lengths=tuple(lengths))
