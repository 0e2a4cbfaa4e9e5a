"""Which of many strategies a step uses, where training waits for the answer."""

import numpy as np
import pytest

from lengthwise.plan.heterogeneous.adaptive_pipelines import candidate_families, placed_strategy
from lengthwise.plan.heterogeneous.strategy_candidates import StrategyCandidates
from lengthwise.plan.space.problem import PricedBatch
from tests.plan.costs import SimpleCost, make_batch, make_problem

NUM_DEVICES = 8
SLOWER = 1.01
"""How much slower than the best of all strategies the likely best may be."""


def lengths_of(seed, longest=100):
    rng = np.random.default_rng(seed)
    return np.append(np.minimum(rng.lognormal(3, 1, 39).astype(int) + 1, longest), longest)


@pytest.fixture(scope="module")
def problem():
    cost = SimpleCost(a_s=1e-4, b_s=1e-2, c_s=0.1, capacity=60, loss=0.3)
    samples = [lengths_of(seed) for seed in range(3)]
    return make_problem(cost, num_devices=NUM_DEVICES, recomputed=(0, 4), stages=[1, 2], samples=samples)


@pytest.fixture
def candidates(problem):
    """Equal pipelines of every family, and pairs of unlike ones."""
    families = candidate_families(problem)
    counts = [((f, NUM_DEVICES // f.num_devices),) for f in families if NUM_DEVICES % f.num_devices == 0]
    counts += [((f, 1), (g, 1)) for f in families for g in families if f.num_devices + g.num_devices == NUM_DEVICES]
    return StrategyCandidates([placed_strategy(problem, each) for each in counts])


def test_of_plans_that_are_waited_for_few_strategies_are_bounded_and_hardly_a_faster_one_is_missed(problem, candidates):
    candidates.learn([PricedBatch(problem, make_batch(sample)) for sample in problem.samples])
    for seed in range(10, 16):
        fully, quickly = (PricedBatch(problem, make_batch(lengths_of(seed))) for _ in range(2))
        best = candidates.best(fully, [0.0] * len(candidates.strategies))
        likely = candidates.likely_best(quickly, most_planned=2, enough_s=0.0)
        assert likely.time_s <= best.time_s * SLOWER
        assert len(quickly._certificates) < 0.5 * len(candidates.strategies)
        assert sorted(i for pipeline in likely.phase for pack in pipeline.packs for i in pack) == list(range(40))


def test_the_fastest_strategies_are_those_whose_plans_take_little_longer_than_the_fastest_one(problem, candidates):
    nearly = 1.3
    priced = PricedBatch(problem, make_batch(lengths_of(10)))
    holding = [strategy for strategy in candidates.strategies if strategy.max_length >= priced.lengths.max()]
    every_s = sorted(strategy.planned(priced)[1] + strategy.update_s for strategy in holding)
    near_s = [time_s for time_s in every_s if time_s < every_s[0] * nearly]
    found = candidates.fastest(priced, candidates.bounds_s(priced), most=len(every_s), nearly=nearly)
    assert len(near_s) > 2 and [plan.time_s for plan in found] == pytest.approx(near_s)
    assert len(candidates.fastest(priced, candidates.bounds_s(priced), most=2, nearly=nearly)) == 2
    assert candidates.best(priced, candidates.bounds_s(priced)).time_s == found[0].time_s


def test_nothing_is_planned_after_a_plan_that_is_fast_enough(problem, candidates):
    priced = PricedBatch(problem, make_batch(lengths_of(10)))
    first = candidates.likely_best(priced, most_planned=1, enough_s=0.0)
    assert candidates.likely_best(priced, most_planned=9, enough_s=np.inf).strategy is first.strategy


def test_what_no_strategy_holds_has_no_plan(problem, candidates):
    longest = max(strategy.max_length for strategy in candidates.strategies)
    priced = PricedBatch(problem, make_batch(lengths_of(10, longest=longest + 1)))
    assert candidates.likely_best(priced, most_planned=9, enough_s=0.0) is None


def test_strategies_that_differ_in_what_no_sequence_needs_are_bounded_once(problem, candidates):
    strategy = candidates.strategies[0]
    again = placed_strategy(problem, ((candidate_families(problem)[0], strategy.num_pipelines),))
    priced = PricedBatch(problem, make_batch(lengths_of(10, longest=40)))
    assert strategy.bound_s(priced) == again.bound_s(priced) and len(priced._certificates) == 1
