"""Which schemes a cluster offers, and what batches planning looks at."""

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.space.candidate import stages_of
from lengthwise.plan.space.search_space import (
    NUM_SAMPLES,
    RecomputeMode,
    SearchSpace,
    first_batches,
    make_problem,
    sample_lengths,
)


def test_levels_of_recompute_are_none_all_and_eighths_between():
    assert RecomputeMode.AUTO.levels(40) == (0, 5, 10, 15, 20, 25, 30, 35, 40)
    assert RecomputeMode.AUTO.levels(4) == (0, 1, 2, 3, 4)
    assert RecomputeMode.NONE.levels(40) == (0,) and RecomputeMode.ALL.levels(40) == (40,)


def test_the_pool_keeps_its_limits_and_what_fits():
    cluster = cluster_preset("2x4xH100-80GB")
    model = model_preset("llama-tiny")
    problem = make_problem(
        AnalyticCost(model=model, cluster=cluster),
        cluster=cluster,
        num_layers=model.num_layers,
        max_length=1000,
        search_space=SearchSpace(max_degree=4, max_stages=2, methods=(Method.RING,), recompute=RecomputeMode.NONE),
    )
    schemes = [candidate.scheme for candidate in problem.candidates]
    assert {(s.degree, s.num_stages) for s in schemes} == {(d, p) for d in (1, 2, 4) for p in (1, 2)}
    assert {s.methods[0] for s in schemes} == {Method.DENSE, Method.RING}
    assert {s.num_recomputed for s in schemes} == {0}
    assert problem.devices_per_node == 4


def test_a_refusal_names_the_leanest_scheme_that_the_cluster_has_devices_for():
    cluster = cluster_preset("1x8xH100-80GB")
    model = model_preset("llama-66b")
    with pytest.raises(InfeasibleError, match=r"the leanest, <(8,1|4,2|2,4|1,8)>"):
        make_problem(
            AnalyticCost(model=model, cluster=cluster),
            cluster=cluster,
            num_layers=model.num_layers,
            max_length=1000,
            search_space=SearchSpace(),
        )


def test_typical_batches_are_of_the_same_lengths_but_not_the_planned_ones():
    lengths = LengthIndex(lengths=synthetic_lengths("commoncrawl", 100_000, 0))
    planned = first_batches(lengths, tokens_per_step=50_000, seed=5, steps=NUM_SAMPLES)
    samples = list(sample_lengths(lengths, tokens_per_step=50_000, seed=5))
    assert len(samples) == NUM_SAMPLES
    assert not any(np.array_equal(sample, batch.lengths) for sample in samples for batch in planned)
    means = np.mean(np.concatenate(samples)), np.mean(np.concatenate([batch.lengths for batch in planned]))
    assert means[0] == pytest.approx(means[1], rel=0.1)


@pytest.mark.parametrize(
    ("num_devices", "counts"), [(64, [1, 2, 4, 8]), (24, [1, 2, 3, 4, 6, 8]), (100, [1, 2, 4, 5, 8]), (3, [1, 2, 3])]
)
def test_numbers_of_stages_are_powers_of_two_and_divisors_of_the_cluster(num_devices, counts):
    assert stages_of(num_devices, 80) == counts
    assert stages_of(num_devices, 2) == counts[:2]
