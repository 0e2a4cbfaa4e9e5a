"""On a GPU a pack takes the longer of launching its kernels and computing them; on a CPU both."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.cost.profiled.degree_fit import fit_degree
from lengthwise.cost.profiled.fitted import features, fit
from lengthwise.cost.profiled.launch_bound import launch_bound_rows
from tests.cost.profiled import test_dual_layer
from tests.cost.profiles import row, table

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


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_left_out_where_launches_come_on_top(seed):
    columns = np.stack([features(pack) for pack in PACKS])
    seconds = columns @ (SQUARED_S, TOKEN_S, LAUNCHES_S) * noise(seed)
    assert not launch_bound_rows(columns, seconds).any()
