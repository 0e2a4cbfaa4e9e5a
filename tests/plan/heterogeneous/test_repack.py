"""Packs of few sequences are searched by what pipelines really take: never slower, and near the best packing."""

import sys
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from lengthwise.plan.heterogeneous.draft_refinement import DraftRefinement
from lengthwise.plan.heterogeneous.repack import repacked
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from tests.plan.brute_force import BruteForce, partitions
from tests.plan.costs import SimpleCost, make_batch, make_problem

MEAN, WORST = 1.005, 1.05
"""Seconds over those of the best packing: single moves from a packing drawn at random end in a local optimum."""


def staged(rng, *, stages, num_sequences, capacity=150):
    """A problem of one pipeline of several stages, and a batch of few sequences."""
    cost = SimpleCost(c_s=rng.choice([0.0, 0.02, 0.2]), a_s=rng.choice([0.0, 1e-4]), capacity=capacity)
    problem = make_problem(cost, num_devices=stages, degrees=[1], stages=[stages], max_length=60)
    lengths = np.minimum(rng.lognormal(2.5, 1, num_sequences).astype(int) + 1, 60).tolist()
    return problem, PricedBatch(problem, make_batch(lengths))


def phase_of(problem, packs):
    (candidate,) = problem.candidates
    return (PipelineDraft(candidate=candidate, ranks=tuple(range(candidate.num_devices)), packs=packs),)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("stages", [2, 4])
def test_packs_made_anew_compute_the_same_sequences_within_memory_no_slower_and_near_the_best(stages):
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem, priced = staged(rng, stages=stages, num_sequences=int(rng.integers(1, 7)))
        options = [tuple(map(tuple, packs)) for packs in partitions(list(range(len(priced.lengths))))]
        fitting = [packs for packs in options if max(priced.lengths[list(pack)].sum() for pack in packs) <= 150]
        before = DraftPlan(phases=(phase_of(problem, fitting[int(rng.integers(len(fitting)))]),))
        after = DraftPlan(phases=tuple(repacked(priced, phase) for phase in before.phases))
        packs = after.phases[0][0].packs
        assert sorted(position for pack in packs for position in pack) == list(range(len(priced.lengths)))
        assert max(priced.lengths[list(pack)].sum() for pack in packs) <= problem.candidates[0].max_tokens
        assert time_s(priced, after) <= time_s(priced, before) * (1 + 1e-9)
        ratios.append(time_s(priced, after) / BruteForce(problem, problem.candidates, priced.lengths.tolist()).best_s())
    assert min(ratios) >= 1 - 1e-9 and fmean(ratios) < MEAN and max(ratios) < WORST


def test_a_pipeline_of_one_stage_keeps_its_packs():
    problem = make_problem(SimpleCost(capacity=100), num_devices=1)
    phase = phase_of(problem, ((0,), (1,), (2,)))
    assert repacked(PricedBatch(problem, make_batch([5, 6, 7])), phase)[0].packs == phase[0].packs


def test_auto_packs_steps_of_few_sequences_by_the_seconds_of_1f1b(monkeypatch):
    """Of 14 sequences on a pipeline of four stages the flow shop's packs are slower in most steps."""
    gains = []
    for seed in range(3):
        problem, priced = staged(np.random.default_rng(seed), stages=4, num_sequences=14)
        with monkeypatch.context() as without:
            without.setattr(sys.modules[DraftRefinement.__module__], "repacked", lambda priced, phase: phase)
            slower = Planner(policy="auto", problem=problem)(priced.batch)
        plan = Planner(policy="auto", problem=replace(problem))(priced.batch)
        assert slower.lower_bound_s <= plan.time_s * (1 + 1e-9) <= slower.time_s * (1 + 2e-9)
        gains.append(slower.time_s / plan.time_s - 1)
    assert max(gains) > 1e-3 and sum(gain > 1e-9 for gain in gains) >= 2
