"""Tuning finds what trying everything finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.pipeline_config import Method
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.draft_plan import DraftPlan
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.uniform import tune
from lengthwise.plan.uniform.bucket import BUDGETS, batch_sizes, bucket, bucket_edges
from lengthwise.plan.uniform.packed import ROUNDS, packed
from lengthwise.plan.uniform.padded import padded
from lengthwise.plan.uniform.static import static
from lengthwise.plan.uniform.tune import fastest, tuning_batches
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem

SAMPLES = st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=20), min_size=1, max_size=3)
NEGLIGIBLE = 1 + 1e-9
"""Sums in another order round differently."""


def mean_s(policy, batches):
    return np.mean([time_s(batch, DraftPlan(phases=policy.phases(batch))) for batch in batches])


def all_padded(problem, candidate, batches):
    return [padded(problem, candidate, size=2**power) for power in range(10) if 2**power * 100 <= candidate.max_tokens]


def all_buckets(problem, candidate, batches):
    edges = bucket_edges(problem, shortest=min(int(batch.lengths.min()) for batch in batches))
    return [
        bucket(problem, candidate, edges=edges, sizes=batch_sizes(candidate, edges, budget=budget))
        for budget in BUDGETS
    ]


WAYS = {
    "padded": all_padded,
    "static": lambda problem, candidate, batches: [static(problem, candidate)],
    "packed": lambda problem, candidate, batches: [packed(problem, candidate, rounds=rounds) for rounds in ROUNDS],
    "bucket": all_buckets,
}


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=examples(20), deadline=None)
@given(
    samples=SAMPLES,
    num_devices=st.sampled_from([1, 4, 6]),
    capacity=st.integers(40, 400),
    loss=st.sampled_from([0.02, 0.5]),
    overhead_s=st.sampled_from([0.0, 0.5]),
)
def test_no_set_up_of_the_policy_is_faster_on_the_samples(name, samples, num_devices, capacity, loss, overhead_s):
    cost = SimpleCost(capacity=capacity, loss=loss, c_s=overhead_s)
    problem = make_problem(cost, num_devices=num_devices, samples=samples, recomputed=(0, 4))
    batches = tuning_batches(problem)
    tiling = [candidate for candidate in problem.candidates if candidate.max_tokens >= 100]
    every = [policy for candidate in tiling for policy in WAYS[name](problem, candidate, batches)]
    tuned_s = mean_s(prepare(name, problem), batches)
    assert tuned_s <= min(mean_s(policy, batches) for policy in every) * NEGLIGIBLE


@settings(max_examples=examples(50), deadline=None)
@given(SAMPLES, st.integers(40, 400))
def test_floors_are_below_times(samples, capacity):
    problem = make_problem(SimpleCost(capacity=capacity), samples=samples, recomputed=(0, 4))
    for batch in tuning_batches(problem):
        for candidate in problem.candidates:
            if candidate.max_tokens >= 100:
                policy = static(problem, candidate)
                took_s = time_s(batch, DraftPlan(phases=policy.phases(batch)))
                assert policy.floor_s(batch) <= took_s * NEGLIGIBLE


def test_a_trial_ends_when_floors_show_that_it_cannot_win(monkeypatch):
    problem = make_problem(SimpleCost(capacity=400), samples=[[50] * 8] * 8, recomputed=(0, 4))
    tried = []
    monkeypatch.setattr(tune, "time_s", lambda batch, arrangement: tried.append(1) or time_s(batch, arrangement))
    candidates = list(problem.candidates)
    fastest([static(problem, candidate) for candidate in candidates], tuning_batches(problem))
    assert len(tried) < len(candidates) * 8


@pytest.mark.parametrize("name", [*WAYS, "hotspa"])
def test_a_faster_method_is_chosen(name):
    cost = SimpleCost(capacity=30, method_factors={Method.RING: 0.5})
    tuned = prepare(name, make_problem(cost, methods=(Method.ULYSSES, Method.RING), samples=[[100, 50, 20]]))
    assert set(tuned.candidate.scheme.methods) == {Method.RING}


@pytest.mark.parametrize("name", [*WAYS, "hotspa"])
def test_without_samples_every_octave_of_the_longest_length_is_prepared_for(name):
    problem = make_problem(SimpleCost(capacity=300))
    (batch,) = tuning_batches(problem)
    assert sorted(set(batch.lengths.tolist())) == [3, 6, 12, 25, 50, 100]
    assert prepare(name, problem).candidate.max_tokens >= 100


def test_many_or_large_samples_are_thinned_at_even_distances():
    few = make_problem(samples=[np.full(number, 10) for number in range(1, 31)])
    assert [len(batch.lengths) for batch in tuning_batches(few)] == [1, 4, 8, 12, 16, 19, 23, 27]
    large = make_problem(samples=[np.full(2500, 10)] * 5)
    assert len(tuning_batches(large)) == 2
    assert len(tuning_batches(make_problem(samples=[np.full(9000, 10)] * 5))) == 1
