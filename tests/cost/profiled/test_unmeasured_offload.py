"""Profiles are taken without offload and tiles; costs that were fitted to them price both all the same."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.cost import ProfileRow
from lengthwise.core.pipeline_config import Method, dense_scheme, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.fitted import FittedCost
from lengthwise.cost.profiled.hybrid import HybridCost
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from tests.cost.profiles import table

MODEL = replace(model_preset("llama-3-8b"), num_layers=8)
CLUSTER = cluster_preset("2xH100-80GB")
ANALYTIC = AnalyticCost(model=MODEL, cluster=CLUSTER)
LENGTHS = [1 << power for power in range(9, 18)]
PLAIN = [dense_scheme(8), uniform_scheme(8, degree=2, method=Method.ULYSSES)]


def profile_of(scheme):
    """What closed forms say of micro-batches of one sequence, and of several, as if it had been measured."""
    rows = []
    for lengths in [*((length,) for length in LENGTHS), (512,) * 8, (4096,) * 4]:
        state = ANALYTIC.peak_bytes(0, scheme, num_devices=2)
        kept = int(ANALYTIC.peak_bytes(sum(lengths), scheme, num_devices=2) - state)
        rows.append(ProfileRow(lengths=lengths, time_s=ANALYTIC.time_s(lengths, scheme), spread_s=0.0, kept_bytes=kept))
    return table(rows, model_digest=MODEL.digest, model_name=MODEL.name, device="NVIDIA H100", dtype="bfloat16")


@pytest.fixture(scope="module", params=[FittedCost, HybridCost])
def cost(request):
    return request.param([(scheme, profile_of(scheme)) for scheme in PLAIN], model=MODEL, cluster=CLUSTER)


@pytest.mark.parametrize("plain", PLAIN, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("changes", [{"offload": (True,) * 8}, {"tile_tokens": 4096}, {"offload": (True, False) * 4}])
def test_offload_and_tiles_are_priced_as_closed_forms_price_them_beside_what_was_measured(cost, plain, changes):
    scheme, lengths = replace(plain, **changes), np.array([1000, 30_000, 100_000])
    times_s = cost.sequence_times_s(lengths, scheme) + cost.overhead_s(scheme)
    expected_s = ANALYTIC.sequence_times_s(lengths, scheme) + ANALYTIC.overhead_s(scheme)
    assert times_s == pytest.approx(expected_s, rel=0.03)
    assert (times_s >= cost.sequence_times_s(lengths, plain) + cost.overhead_s(plain)).all()
    low_s, high_s = cost.time_range_s([30_000], scheme)
    assert low_s <= times_s[1] * (1 + 1e-9) and times_s[1] <= high_s * (1 + 1e-9)
    held, expected = (one.max_tokens(scheme, num_devices=2) for one in (cost, ANALYTIC))
    assert cost.max_tokens(plain, num_devices=2) < held == pytest.approx(expected, rel=0.1)
    sizes, on_host = np.array([0, 1000, 100_000]), ANALYTIC.host_bytes([0, 1000, 100_000], scheme, num_devices=2)
    assert cost.host_bytes(sizes, scheme, num_devices=2) == pytest.approx(on_host, rel=1e-3)
    assert (np.diff(cost.peak_bytes(sizes, scheme, num_devices=2)) > 0).all()


def test_a_sequence_too_long_for_what_was_measured_is_planned_with_offload(cost):
    space = SearchSpace(max_stages=1, methods=(Method.ULYSSES,))
    longest = max(cost.max_tokens(scheme, num_devices=2) for scheme in PLAIN)
    longer = make_problem(cost, cluster=CLUSTER, num_layers=8, max_length=longest * 5 // 4, search_space=space)
    assert longer.leanest.max_tokens >= longest * 5 // 4 and not longer.leanest.scheme.is_plain
