"""Packs recompute the fewest layers under which they fit, whatever levels the search space has."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.pipeline_config import spread
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.bounds import search_space_bound
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.bounds.step_sequences import TOLERANCE
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.finer_recompute import between, next_fewer
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.search_space import DEFAULT_METHODS, RecomputeMode, SearchSpace, make_problem
from lengthwise.sim.schedule_check import check_matching, operations
from tests.plan.costs import make_batch

SPEC = model_preset("llama-7b")
CLUSTER = cluster_preset("2x8xH100-80GB", memory_gib=40)
COST = AnalyticCost(model=SPEC, cluster=CLUSTER)
RNG = np.random.default_rng(0)
LENGTHS = [[96_000, *np.minimum(RNG.lognormal(9, 1, 24).astype(int) + 1, 60_000).tolist()] for _ in range(3)]


def problem_of(recompute=RecomputeMode.AUTO):
    return make_problem(
        COST, cluster=CLUSTER, num_layers=SPEC.num_layers, max_length=100_000,
        search_space=SearchSpace(offload=OffloadMode.NONE, recompute=recompute, tile_tokens=0, methods=DEFAULT_METHODS),
        samples=[np.array(lengths) for lengths in LENGTHS],
    )  # fmt: skip


PROBLEM = problem_of()


@pytest.mark.parametrize("policy", ["dcp-intra", pytest.param("auto", marks=pytest.mark.deep)])
def test_plans_fit_and_no_micro_batch_would_fit_with_fewer_layers_recomputed(policy):
    planner, levels = Planner(policy=policy, problem=PROBLEM), set()
    for step, lengths in enumerate(LENGTHS):
        plan = planner(make_batch(lengths, step))
        for _, lists in operations(plan):
            check_matching(lists, step=step)
        assert 0 < plan.lower_bound_s <= plan.time_s
        for pipeline in plan.pipelines:
            schemes = [pipeline.scheme_of(micro_batch) for micro_batch in pipeline.micro_batches]
            longest = max((m.pack.num_tokens for m in pipeline.micro_batches), default=0)
            for scheme, micro_batch in zip(schemes, pipeline.micro_batches):
                tokens, layers = micro_batch.pack.num_tokens, scheme.num_recomputed
                assert COST.peak_bytes(tokens, scheme, num_devices=16) <= CLUSTER.device.memory_bytes
                levels.add(layers)
                if layers and scheme.recompute == spread(layers, SPEC.num_layers):
                    fewer = replace(scheme, recompute=spread(layers - 1, SPEC.num_layers))
                    needed = tokens if scheme.num_stages == 1 else longest
                    assert COST.max_tokens(fewer, num_devices=16) < needed
    assert levels - set(RecomputeMode.AUTO.levels(SPEC.num_layers)), "some lie between eighths"


def test_levels_between_two_candidates_hold_more_and_more_tokens():
    pairs = next_fewer(PROBLEM.candidates)
    assert len(pairs) > 50
    for more, fewer in list(pairs.items())[::5]:
        assert replace(more.scheme, recompute=fewer.scheme.recompute) == fewer.scheme
        tokens = [candidate.max_tokens for candidate in (fewer, *between(fewer, more), more)]
        assert tokens == sorted(tokens) and len(set(tokens[1:-1])) == len(tokens[1:-1])


def test_levels_looked_at_by_halves_leave_no_scheme_out_of_the_bound(monkeypatch):
    """With two stages every second level has as much room as the one before it, which is faster."""
    spec, cluster = model_preset("llama-13b"), cluster_preset("2x8xH100-80GB")
    problem = make_problem(
        AnalyticCost(model=spec, cluster=cluster), cluster=cluster, num_layers=spec.num_layers, max_length=100_000,
        search_space=SearchSpace(methods=DEFAULT_METHODS), samples=[np.array(lengths) for lengths in LENGTHS],
    )  # fmt: skip
    assert any(more.scheme.num_recomputed - fewer.scheme.num_recomputed > 6
               for more, fewer in next_fewer(problem.candidates).items() if more.num_stages > 1)  # fmt: skip
    halved = SearchSpaceBound(problem, problem.candidates, any_recompute=True)
    monkeypatch.setattr(search_space_bound, "halfway", lambda fewer, more: None)
    one_by_one = SearchSpaceBound(problem, problem.candidates, any_recompute=True)
    for of_halves, of_all in zip(halved._tables, one_by_one._tables, strict=True):
        assert (of_halves <= of_all * (1 + 1e-12)).all()
        finite = np.isfinite(of_all)
        assert (of_halves[finite] >= of_all[finite] * 0.99).all()


@pytest.mark.parametrize("mode", [RecomputeMode.NONE, RecomputeMode.ALL])
def test_one_level_has_none_beside_it(mode):
    assert not next_fewer(problem_of(mode).candidates)


def test_the_bound_of_any_level_is_hardly_below_that_of_all_levels_one_by_one():
    pairs = next_fewer(PROBLEM.candidates)
    every = (*PROBLEM.candidates, *(finer for more, fewer in pairs.items() for finer in between(fewer, more)))
    of_any = SearchSpaceBound(PROBLEM, PROBLEM.candidates, any_recompute=True)
    of_every, of_eighths = SearchSpaceBound(PROBLEM, every), SearchSpaceBound(PROBLEM, PROBLEM.candidates)
    for lengths in LENGTHS:
        priced = PricedBatch(PROBLEM, make_batch(lengths))
        any_s, every_s, eighths_s = (bound.step_s(priced) for bound in (of_any, of_every, of_eighths))
        assert every_s * 0.999 <= any_s <= every_s * (1 + 2 * TOLERANCE)
        assert any_s <= eighths_s
