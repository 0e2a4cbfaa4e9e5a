"""What is drawn at random is drawn from all there is, the same on every rank, and computes every sequence once."""

import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement
from lengthwise.plan.layerwise.random_methods import RandomMethods, random_strategies
from lengthwise.plan.planner import Planner
from tests.plan.costs import SimpleCost, make_batch, make_problem

BATCHES = [make_batch(range(3, 90, 4), step=step) for step in range(24)]
SHARDED = {method for method, weights in WEIGHTS_OF.items() if weights is WeightPlacement.SHARDED}


def planner(**options):
    return Planner(policy="static", problem=make_problem(methods=(Method.ULYSSES_Z,), **options))


def drawn(plan):
    return {m.methods for pipeline in plan.pipelines for m in pipeline.micro_batches if m.methods}


def test_methods_are_drawn_for_every_layer_of_every_micro_batch():
    draw = RandomMethods(planner=planner(degrees=[2], stages=[1, 2]), seed=1)
    plans = [draw(batch) for batch in BATCHES]
    for batch, plan in zip(BATCHES, plans):
        plan.check_covers(batch)
        assert plan.time_s >= plan.lower_bound_s
    mixes = set().union(*map(drawn, plans))
    assert {method for methods in mixes for method in methods} == SHARDED
    assert max(len(set(methods)) for methods in mixes) > 1


def test_strategies_of_every_degree_and_number_of_stages_are_drawn():
    draw = random_strategies(planner(degrees=[1, 2, 3, 4], stages=[1, 2, 4]), seed=1)
    plans = [draw(batch) for batch in BATCHES]
    for batch, plan in zip(BATCHES, plans):
        plan.check_covers(batch)
        assert plan.num_devices == 4
        assert all(m.methods is None for p in plan.pipelines if p.scheme.degree == 1 for m in p.micro_batches)
    strategies = {(p.scheme.degree, p.scheme.num_stages) for plan in plans for p in plan.pipelines}
    assert strategies == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}  # 3 does not tile four devices


def test_draws_depend_on_seed_and_step_alone():
    first, again, other = (random_strategies(planner(), seed=seed) for seed in (1, 1, 2))
    digests = [first(batch).digest for batch in BATCHES]
    assert [again(batch).digest for batch in reversed(BATCHES)] == digests[::-1]  # whatever came before
    assert [other(batch).digest for batch in BATCHES] != digests


def test_strategies_that_do_not_hold_the_longest_sequence_are_not_drawn():
    cost = SimpleCost(capacity=45)
    draw = random_strategies(planner(cost=cost, max_length=87, degrees=[1, 2, 4], stages=[1]), seed=1)
    plans = [draw(batch) for batch in BATCHES]
    assert {p.scheme.degree for plan in plans for p in plan.pipelines} == {2, 4}
    with pytest.raises(InfeasibleError, match=r"no strategy to draw: .* tile 4 devices .* \(87 tokens\)"):
        random_strategies(planner(cost=cost, max_length=87, degrees=[1, 3], stages=[1]), seed=1)
