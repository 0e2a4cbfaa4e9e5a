"""On a GPU a pack takes the longer of launching its kernels and computing them; on a CPU both."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.forward_cost import ForwardOnlyCost
from lengthwise.cost.profiled.degree_fit import fit_degree
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.cost.profiled.fitted import features, fit
from lengthwise.cost.profiled.launch_bound import launch_bound_rows
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from tests.cost.profiled import test_dual_layer
from tests.cost.profiles import CLUSTER, row, table

PACKS = [(32 * 2**power,) for power in range(10)] + [(63, 64) * 64]
SQUARED_S, TOKEN_S, LAUNCHES_S = 0.15 / 16_384**2, 0.0153e-3, 0.07
"""Of a Llama of 0.85B on an H100: attention, all else, and the launches of a forward and backward."""
MANY = tuple(int(length) for length in np.random.default_rng(0).lognormal(5.5, 1.3, 60))
COMPUTED_S = features(MANY) @ (SQUARED_S, TOKEN_S, 0.0)


def seconds_on_gpu(lengths):
    return max(LAUNCHES_S, features(lengths) @ (SQUARED_S, TOKEN_S, 0.0))


def noise(seed):
    return 1 + 0.02 * np.random.default_rng(seed).standard_normal(len(PACKS))


@pytest.mark.parametrize("seed", range(5))
def test_packs_of_many_sequences_are_priced_by_what_they_compute(seed):
    rows = [replace(row(pack), time_s=seconds_on_gpu(pack) * factor) for pack, factor in zip(PACKS, noise(seed))]
    found = fit(table(rows))
    assert found.time_s(MANY) == pytest.approx(COMPUTED_S, rel=0.15)
    assert found.median_error < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_so_are_those_of_layers_that_were_measured(seed):
    rows = [
        replace(test_dual_layer.row(pack), forward_s=seconds_on_gpu(pack) * factor, backward_s=1e-9, constant_s=1e-9)
        for pack, factor in zip(PACKS, noise(seed))
    ]
    found = fit_degree(rows).forward
    assert found.of_sequences(np.array(MANY)).sum() + found.c_s == pytest.approx(COMPUTED_S, rel=0.15)


def test_a_plan_prices_no_micro_batch_below_its_launches():
    """And launches count for every pass of every layer: the forward of recomputed ones twice."""
    rows = [
        replace(test_dual_layer.row(pack), forward_s=seconds_on_gpu(pack), backward_s=1e-9, constant_s=1e-9)
        for pack in PACKS
    ]
    cost = DualLayerCost(test_dual_layer.table(rows), cluster=CLUSTER)
    num_layers = cost.table.num_layers
    plain, recomputed = (dense_scheme(num_layers, recompute=recompute) for recompute in (False, True))
    assert cost.launch_s(plain) == pytest.approx(num_layers * LAUNCHES_S, rel=1e-6)
    assert cost.launch_s(recomputed) == pytest.approx(2 * num_layers * LAUNCHES_S, rel=1e-6)
    assert cost.time_s([40], plain) == cost.launch_s(plain)
    assert CorrectedCost(cost, time_factors={1: 1.5}).time_s([40], plain) == 1.5 * cost.launch_s(plain)
    assert ForwardOnlyCost(training=cost).launch_s(recomputed) == pytest.approx(cost.launch_s(plain) / 3)
    problem = make_problem(
        cost, cluster=CLUSTER, num_layers=num_layers, max_length=64, search_space=SearchSpace(max_degree=1)
    )
    plan = Planner(policy="auto", problem=problem)(GlobalBatch(step=0, ids=(0, 1, 2, 3), lengths=(40, 50, 60, 64)))
    times_s = [micro_batch.time_s for pipeline in plan.pipelines for micro_batch in pipeline.micro_batches]
    assert min(times_s) >= cost.launch_s(plain)
    assert plan.time_s >= cost.launch_s(plain)


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_left_out_where_launches_come_on_top(seed):
    columns = np.stack([features(pack) for pack in PACKS])
    seconds = columns @ (SQUARED_S, TOKEN_S, LAUNCHES_S) * noise(seed)
    assert not launch_bound_rows(columns, seconds).any()
