"""From a strategy to faster ones of the step, by moves that its plans confirm."""

import numpy as np

from lengthwise.plan import auto
from lengthwise.plan.heterogeneous.adaptive_pipelines import candidate_families, placed_strategy
from lengthwise.plan.heterogeneous.planned_moves import improved
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates, planned_below
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.problem import PricedBatch
from tests.plan.costs import SimpleCost, make_batch, make_problem

NUM_DEVICES = 8


def step_of(seed, num_devices=NUM_DEVICES):
    """A step, the strategies of equal pipelines, and that of one kind of these which is slowest for it."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(3, 1, 40).astype(int) + 1, 100)
    cost = SimpleCost(a_s=1e-4, b_s=1e-2, c_s=0.1, capacity=60, loss=0.3)
    problem = make_problem(cost, num_devices=num_devices, recomputed=(0, 4), stages=[1, 2], samples=[lengths])
    priced = PricedBatch(problem, make_batch(lengths))
    equal = [
        placed_strategy(problem, ((family, num_devices // family.num_devices),))
        for family in candidate_families(problem)
        if num_devices % family.num_devices == 0
    ]
    plans = filter(None, [planned_below(strategy, priced, np.inf) for strategy in equal])
    holding = [plan for plan in plans if np.isfinite(plan.time_s)]
    return priced, equal, max(holding, key=lambda plan: plan.time_s)


def test_moves_leave_the_slowest_of_equal_pipelines_for_mixes_that_beat_all_of_them():
    for seed in range(6):
        priced, equal, slowest = step_of(seed)
        found = improved(priced, slowest, equal, most_plans=1000)
        candidates = StrategyCandidates(equal)
        best_equal = candidates.best(priced, candidates.bounds_s(priced))
        assert found.time_s <= best_equal.time_s
        assert found.time_s == planned_below(found.strategy, priced, np.inf).time_s
        assert sorted(i for pipeline in found.phase for pack in pipeline.packs for i in pack) == list(range(40))


def test_nothing_is_moved_without_plans_to_spend():
    priced, equal, slowest = step_of(0)
    assert improved(priced, slowest, equal, most_plans=0) is slowest


def test_pipelines_of_the_same_shape_are_tried_though_no_strategy_has_them():
    priced, _, slowest = step_of(0)
    found = improved(priced, slowest, [], most_plans=1000)
    assert found.time_s < slowest.time_s
    tiles = [*found.strategy.tiles, *slowest.strategy.tiles]
    assert len({(tile.candidate.num_devices, tile.candidate.num_stages) for tile in tiles}) == 1


def test_devices_that_the_strategy_leaves_idle_stay_so():
    priced, equal, _ = step_of(0)
    family = next(family for family in candidate_families(priced.problem) if family.max_tokens >= 100)
    few = placed_strategy(priced.problem, ((family, 1),))
    found = improved(priced, planned_below(few, priced, np.inf), equal, most_plans=1000)
    assert sum(tile.count * tile.candidate.num_devices for tile in found.strategy.tiles) == family.num_devices


def test_plans_of_auto_are_faster_by_moves_from_what_was_proposed(monkeypatch):
    rng = np.random.default_rng(39)
    lengths, *samples = [np.minimum(rng.lognormal(3, 1, count).astype(int) + 1, 200) for count in (25, 60, 60)]
    cost = SimpleCost(a_s=1e-3, b_s=1e-2, c_s=0.5, capacity=60, loss=0.1)
    problem = make_problem(cost, num_devices=12, recomputed=(0, 4), stages=[1, 2, 4], samples=samples)
    with_moves_s = Planner(policy="auto", problem=problem)(make_batch(lengths)).time_s
    monkeypatch.setattr(auto, "improved", lambda priced, start, strategies, most_plans: start)
    assert with_moves_s < Planner(policy="auto", problem=problem)(make_batch(lengths)).time_s * 0.99
