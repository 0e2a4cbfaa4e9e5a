"""Under noisy profiles `auto` is, in the mean over many of them, within one per cent of the best policy, or faster."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.optimize import nnls

from lengthwise.core.cost import CostError
from lengthwise.plan.planner import Planner
from tests.plan.costs import SimpleCost, make_batch, make_problem

POLICIES = ("auto", "static", "packed", "dcp-intra", "hydraulis", "hotspa")
TRUE = {degree: (1e-7 * loss / degree, 1e-4 * loss / degree, 5e-3) for degree, loss in ((1, 1.0), (2, 1.12), (4, 1.25))}
"""a, b and c of every degree, as runs would take them."""
ROWS = [(64,), (128,), (256,), (512,), (1024,), (2048,), (64,) * 16]
REGRET = 0.01
"""How much slower than the best policy `auto` may be, in the mean over profiles."""
DRAWS, STEPS, LONGEST, SWITCH_S = 8, 3, 2048, 0.02


@dataclass(frozen=True)
class ProfiledCost(SimpleCost):
    """a l^2 + b l + c by degree, fitted to noisy measurements, with the error of the fit."""

    curves: dict[int, np.ndarray] = field(default_factory=dict)
    error: CostError | None = None

    def sequence_times_s(self, lengths, scheme):
        a, b, _ = self.curves[scheme.degree]
        length = np.asarray(lengths, dtype=float)
        return (a * length + b) * length + 1e-12

    def overhead_s(self, scheme):
        return self.curves[scheme.degree][2]


def powers(lengths):
    length = np.array(lengths, dtype=float)
    return np.array([(length**2).sum(), length.sum(), 1.0])


def profile(rng, *, of_rows, of_degrees):
    """A cost fitted to rows that are off by noise of their own, and by noise that all rows of a degree share."""
    curves, residuals = {}, []
    for degree, curve in TRUE.items():
        common = rng.normal(0.0, of_degrees)
        columns = np.array([powers(r) / (powers(r) @ curve * np.exp(common + rng.normal(0.0, of_rows))) for r in ROWS])
        scale = columns.max(axis=0)
        curves[degree] = nnls(columns / scale, np.ones(len(ROWS)))[0] / scale
        residuals += list(columns @ curves[degree] - 1)
    return ProfiledCost(capacity=1024, curves=curves, error=CostError.of(residuals))


def true_time_s(plan):
    """Seconds that a plan takes in truth."""
    phases = {}
    for pipeline in plan.pipelines:
        time_s = sum(powers(m.pack.lengths) @ TRUE[pipeline.scheme.degree] for m in pipeline.micro_batches)
        phases[pipeline.phase] = max(phases.get(pipeline.phase, 0.0), time_s)
    return sum(phases.values()) + SWITCH_S * len(phases)


def lengths_of(rng):
    return np.clip(rng.lognormal(5.3, 1.1, 24), 16, LONGEST).astype(int)


@pytest.mark.deep
@pytest.mark.parametrize(("of_rows", "of_degrees"), [(0.05, 0.0), (0.05, 0.1), (0.1, 0.05)])
def test_auto_is_within_one_percent_of_the_best_policy_in_the_mean_over_noisy_profiles(of_rows, of_degrees):
    rng = np.random.default_rng(0)
    samples = [lengths_of(rng) for _ in range(4)]
    seconds = dict.fromkeys(POLICIES, 0.0)
    for _ in range(DRAWS):
        cost = profile(rng, of_rows=of_rows, of_degrees=of_degrees)
        problem = make_problem(cost, num_devices=4, stages=[1], max_length=LONGEST, samples=samples)
        batches = [make_batch(lengths_of(rng)) for _ in range(STEPS)]
        for policy in POLICIES:
            planner = Planner(policy=policy, problem=problem)
            seconds[policy] += sum(true_time_s(planner(batch)) for batch in batches)
    auto_s = seconds.pop("auto")
    assert auto_s <= (1 + REGRET) * min(seconds.values()), (auto_s, seconds)
