"""Steps of few sequences are searched in a policy's own candidates; larger ones are planned as published."""

import numpy as np
import pytest

from lengthwise.plan.dcp import dcp
from lengthwise.plan.heterogeneous import hydraulis
from lengthwise.plan.heterogeneous.small_steps import FEW_SEQUENCES, strategies_of_step
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.draft_plan import DraftPlan
from lengthwise.plan.space.finer_recompute import between, next_fewer
from lengthwise.plan.space.finished_plan import to_plan
from lengthwise.plan.space.problem import PricedBatch
from tests.plan.costs import SimpleCost, make_batch, make_problem

AS_PUBLISHED = {"hydraulis": hydraulis.prepare, "dcp-inter": dcp.prepare_inter, "dcp-intra": dcp.prepare_intra}
POLICIES = pytest.mark.parametrize("policy", AS_PUBLISHED)


def problem_of(seed=0, num_devices=4):
    rng = np.random.default_rng(seed)
    cost = SimpleCost(a_s=1e-4, b_s=1e-2, c_s=0.1, capacity=60, loss=0.3)
    samples = [np.minimum(rng.lognormal(3, 0.8, 30).astype(int) + 1, 100) for _ in range(3)]
    return make_problem(cost, num_devices=num_devices, recomputed=(0, 4), stages=[1, 2], samples=samples)


def published_plan(policy, problem, batch):
    priced = PricedBatch(problem, batch)
    return to_plan(priced, DraftPlan(phases=AS_PUBLISHED[policy](problem).phases(priced)), policy=policy)


@POLICIES
def test_steps_of_more_than_a_few_sequences_are_planned_as_published(policy):
    problem, rng = problem_of(), np.random.default_rng(1)
    batch = make_batch(rng.integers(1, 100, FEW_SEQUENCES + 1))
    assert Planner(policy=policy, problem=problem)(batch).pipelines == published_plan(policy, problem, batch).pipelines


@pytest.mark.first_cells(1)
@POLICIES
def test_steps_of_a_few_sequences_are_never_slower_than_as_published_and_some_are_faster(policy):
    problem, rng = problem_of(), np.random.default_rng(2)
    batches = [make_batch(rng.integers(1, 100, rng.integers(1, 9)), step) for step in range(12)]
    planner = Planner(policy=policy, problem=problem)
    times_s = [(planner(batch).time_s, published_plan(policy, problem, batch).time_s) for batch in batches]
    assert all(searched_s <= published_s * (1 + 1e-9) for searched_s, published_s in times_s)
    assert any(searched_s < published_s * 0.98 for searched_s, published_s in times_s)


@pytest.mark.first_cells(1)
@POLICIES
def test_searched_steps_keep_to_the_candidates_of_their_policy_and_to_its_phases(policy):
    problem, rng = problem_of(), np.random.default_rng(3)
    candidates = AS_PUBLISHED[policy](problem).candidates
    between_levels = [finer for more, fewer in next_fewer(candidates).items() for finer in between(fewer, more)]
    schemes = {candidate.scheme for candidate in (*candidates, *between_levels)}
    planner = prepare(policy, problem)
    for step in range(8):
        draft = planner(PricedBatch(problem, make_batch(rng.integers(1, 100, rng.integers(1, 9)), step)))
        pipelines = [pipeline for phase in draft.phases for pipeline in phase]
        assert {run.scheme for pipeline in pipelines for run in (pipeline.candidate, *pipeline.runs)} <= schemes
        assert policy != "hydraulis" or len(draft.phases) == 1


def test_all_strategies_that_fill_a_few_devices_are_looked_at():
    problem = problem_of(num_devices=2)
    dense, deep, wide = (
        next(c for c in problem.candidates if (c.scheme.degree, c.num_stages) == shape)
        for shape in [(1, 1), (1, 2), (2, 1)]
    )
    assert strategies_of_step(problem, [dense, deep, wide]) == [((dense, 2),), ((deep, 1),), ((wide, 1),)]
