"""Both cost models grow with every length, price packs by their sequences, and agree with what they are made of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.cost import ProfileRow, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.scheme import Method, Scheme, Weights, dense_scheme, homogeneous
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic import AnalyticCost
from lengthwise.cost.fitted import FittedCost, fit
from lengthwise.cost.memory import state_bytes

MODEL = model_preset("llama-tiny")
CLUSTER = cluster_preset("2xcpu")
SCHEME = dense_scheme(MODEL.num_layers)


def table(rows, **changes):
    values = {
        "model_digest": MODEL.digest, "model_name": MODEL.name, "device": "cpu", "dtype": "float32",
        "recompute": False, "num_ranks": 2, "update_s": 0.03,
    }  # fmt: skip
    return ProfileTable(**{**values, **changes}, rows=tuple(rows))


def row(lengths, a=1e-8, b=1e-5, c=2e-3, noise=1.0):
    time_s = (a * sum(n * n for n in lengths) + b * sum(lengths) + c) * noise
    return ProfileRow(lengths=lengths, time_s=time_s, spread_s=0.0, kept_bytes=1000 + 64 * sum(lengths))


ROWS = [row(lengths) for lengths in [(64,), (256,), (1024,), (4096,), (256,) * 16, (1024, 512, 64)]]


def costs():
    return [
        AnalyticCost(model=MODEL, cluster=CLUSTER, dtype="float32"),
        FittedCost(table(ROWS), model=MODEL, cluster=CLUSTER),
    ]


@pytest.mark.parametrize("cost", costs(), ids=["analytic", "fitted"])
def test_times_and_bytes_grow_with_every_length(cost):
    @given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 1000))
    def check(lengths, more):
        longer = [lengths[0] + more, *lengths[1:]]
        assert cost.time_s(longer, SCHEME) > cost.time_s(lengths, SCHEME)
        few, many = (cost.peak_bytes(sum(n), SCHEME, num_devices=2) for n in (lengths, longer))
        assert few <= many

    check()


@pytest.mark.parametrize("cost", costs(), ids=["analytic", "fitted"])
def test_a_pack_costs_its_sequences_and_one_overhead(cost):
    lengths = [500, 20, 3000]
    parts = cost.sequence_times_s(np.array(lengths), SCHEME).sum()
    assert cost.time_s(lengths, SCHEME) == pytest.approx(parts + cost.overhead_s(SCHEME))
    assert cost.time_s([3520], SCHEME) > cost.time_s(lengths, SCHEME)  # attention does not cross boundaries


@pytest.mark.parametrize("cost", costs(), ids=["analytic", "fitted"])
def test_max_tokens_is_the_most_that_fits(cost):
    most = cost.max_tokens(SCHEME, num_devices=2)
    limit = CLUSTER.device.memory_bytes
    assert cost.peak_bytes(most, SCHEME, num_devices=2) <= limit < cost.peak_bytes(most + 2, SCHEME, num_devices=2)


def test_a_model_that_fits_nowhere_has_room_for_no_token():
    cost = AnalyticCost(model=model_preset("llama-7b"), cluster=cluster_preset("8xA100-40GB"))
    assert cost.max_tokens(dense_scheme(32), num_devices=8) == 0


def test_fitting_finds_the_coefficients_that_made_the_rows():
    found = fit(table(ROWS))
    assert (found.a_s, found.b_s, found.c_s) == pytest.approx((1e-8, 1e-5, 2e-3), rel=1e-6)
    assert (found.fixed_bytes, found.bytes_per_token) == pytest.approx((1000, 64), rel=1e-6)
    assert found.median_error < 1e-9


def test_one_spoiled_row_does_not_pull_the_others_along():
    rows = [row(lengths) for lengths in [(64,), (128,), (256,), (512,), (1024,), (4096,), (256,) * 16, (64,) * 64]]
    spoiled = [replace(rows[0], time_s=3 * rows[0].time_s), *rows[1:]]
    found = fit(table(spoiled))
    assert (found.a_s, found.b_s) == pytest.approx((1e-8, 1e-5), rel=0.02)
    assert found.median_error < 0.01


def test_fitted_coefficients_are_never_negative():
    rows = [replace(r, time_s=1e-5 * sum(r.lengths) * (1 - 1e-5 * sum(r.lengths))) for r in ROWS]  # concave
    found = fit(table(rows))
    assert min(found.a_s, found.b_s, found.c_s) >= 0
    assert found.median_error > 0


def test_noise_shows_in_the_residuals():
    found = fit(table([row(r.lengths, noise=1.1 if i % 2 else 0.9) for i, r in enumerate(ROWS)]))
    assert 0.02 < found.median_error < 0.2


def test_recompute_costs_a_forward_and_saves_memory():
    cost = AnalyticCost(model=MODEL, cluster=CLUSTER, dtype="float32")
    again = dense_scheme(MODEL.num_layers, recompute=True)
    ratio = cost.sequence_times_s(np.array([4096]), again) / cost.sequence_times_s(np.array([4096]), SCHEME)
    assert ratio[0] == pytest.approx(4 / 3)
    assert cost.max_tokens(again, num_devices=1) > 2 * cost.max_tokens(SCHEME, num_devices=1)


def test_more_devices_hold_less_optimizer_state_each():
    sizes = [state_bytes(MODEL, num_devices=n, dtype="bfloat16") for n in (1, 2, 4)]
    assert sizes[0] == MODEL.num_params * 18
    assert sizes[0] > sizes[1] > sizes[2] > MODEL.num_params * 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FittedCost(table(ROWS, model_digest="0"), model=MODEL, cluster=CLUSTER), "profile is of model"),
        (lambda: FittedCost(table(ROWS[:2]), model=MODEL, cluster=CLUSTER), "2 rows"),
        (
            lambda: FittedCost(table(ROWS, recompute=True), model=MODEL, cluster=CLUSTER).overhead_s(SCHEME),
            "taken with recompute=true",
        ),
        (
            lambda: costs()[0].overhead_s(
                Scheme(degree=2, stage_layers=(4,), methods=(Method.METP,) * 4, recompute=(False,) * 4,
                       weights=Weights.SHARDED)
            ),
            "no costs yet for degree 2",
        ),
        (
            lambda: AnalyticCost(model=model_preset("transformer-1d-5b"), cluster=CLUSTER).max_tokens(
                dense_scheme(42), num_devices=1
            ),
            "no memory model yet for family",
        ),
    ],
)  # fmt: skip
def test_what_has_no_cost_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_profiles_survive_the_disk(tmp_path):
    path = tmp_path / "profile.json"
    table(ROWS).save(path)
    assert ProfileTable.load(path) == table(ROWS)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"schema_version": 99, "rows": []}'])
def test_files_that_are_no_profile_are_refused_with_the_way_out(text, tmp_path):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"profile"):
        ProfileTable.load(path)


def test_update_grows_with_the_model_and_crosses_nodes_slower():
    cost = AnalyticCost(model=model_preset("llama-7b"), cluster=cluster_preset("2x8xH100-80GB"))
    scheme = dense_scheme(32)
    within, across = (cost.update_s(homogeneous(scheme, n)) for n in (8, 16))
    assert 0.05 < within < across < 5
