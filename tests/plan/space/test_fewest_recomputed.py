"""The search space has the fewest recomputed layers under which the longest sequence fits, between its eighths."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.pipeline_config import WeightPlacement, spread
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.dcp.dcp import prepare_inter
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace, make_problem

SPEC = model_preset("transformer-1d-5b")
CLUSTER = cluster_preset("1x8xH200-141GB", memory_gib=80)
COST = AnalyticCost(model=SPEC, cluster=CLUSTER)


def problem_of(max_length, recompute=RecomputeMode.AUTO):
    return make_problem(
        COST, cluster=CLUSTER, num_layers=SPEC.num_layers, max_length=max_length,
        search_space=SearchSpace(offload=OffloadMode.NONE, recompute=recompute),
    )  # fmt: skip


def fewest_by_hand(problem, max_length):
    """Every number of layers under every scheme of one stage with whole weights, tried one after the other."""
    single = [c for c in problem.candidates if c.num_stages == 1 and c.scheme.is_plain]
    bases = [c for c in single if c.scheme.weights is WeightPlacement.WHOLE]
    for layers in range(SPEC.num_layers + 1):
        schemes = {replace(c.scheme, recompute=spread(layers, SPEC.num_layers)) for c in bases}
        if any(COST.max_tokens(scheme, num_devices=8) >= max_length for scheme in schemes):
            return layers
    return None


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("max_length", [200_000, 300_000, 432_000])
def test_dcp_inter_recomputes_the_fewest_layers_that_the_longest_sequence_needs(max_length):
    problem = problem_of(max_length)
    fewest = fewest_by_hand(problem, max_length)
    candidates = prepare_inter(problem).candidates
    assert {candidate.scheme.num_recomputed for candidate in candidates} == {fewest}
    plain = {c.scheme.degree for c in problem.candidates if c.num_stages == 1 and c.scheme.num_recomputed == 42}
    assert {candidate.scheme.degree for candidate in candidates} <= plain


def test_some_of_these_lie_between_eighths_and_others_need_no_more_levels():
    eighths = set(RecomputeMode.AUTO.levels(SPEC.num_layers))
    levels = {c.scheme.num_recomputed for c in problem_of(432_000).candidates}
    assert 1 <= len(levels - eighths) <= 4, "one for each limit of the degree"
    assert {c.scheme.num_recomputed for c in problem_of(4_096).candidates} <= eighths


def test_modes_with_one_level_get_no_other():
    for mode in (RecomputeMode.NONE, RecomputeMode.ALL):
        levels = {c.scheme.num_recomputed for c in problem_of(200_000, mode).candidates}
        assert levels == set(mode.levels(SPEC.num_layers))


def test_schemes_are_in_the_search_space_once():
    schemes = [candidate.scheme for candidate in problem_of(432_000).candidates]
    assert len(schemes) == len(set(schemes)) and np.all([COST.max_tokens(s, num_devices=8) for s in schemes])
