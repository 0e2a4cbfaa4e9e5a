"""The forest answers inside the profile, the polynomial beyond, and neither ever lets a longer sequence cost less."""

import builtins
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.polynomial import polyval

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.cost.profiled.hybrid import MEMORY_MARGIN, HybridCost, learn
from lengthwise.cost.profiled.monotone_curve import choose_polynomial, fit_polynomial, grow_forest, make_curve
from tests.cost.profiles import CLUSTER, MANY_LENGTHS, MODEL, row, table
from tests.examples import examples

SCHEME = dense_scheme(MODEL.num_layers)
NOISY = [row(lengths, noise=1 + 0.2 * (-1) ** n) for n, lengths in enumerate(MANY_LENGTHS)]
LONGEST = 4096
BETWEEN_LENGTHS = 0.01
"""The curve never falls below what it reached between two whole lengths, where the forest is not asked here."""


@pytest.fixture(scope="module")
def cost():
    return HybridCost(table(NOISY), model=MODEL, cluster=CLUSTER)


def test_times_and_bytes_never_fall_however_noisy_the_profile(cost):
    @settings(max_examples=examples(50))
    @given(st.lists(st.integers(1, 3 * LONGEST), min_size=1, max_size=8), st.integers(1, 1000))
    def check(lengths, more):
        longer = [lengths[0] + more, *lengths[1:]]
        assert cost.time_s(longer, SCHEME) >= cost.time_s(lengths, SCHEME)

    check()
    everything = np.arange(1, 3 * LONGEST)
    assert (np.diff(cost.sequence_times_s(everything, SCHEME)) >= 0).all()
    assert (np.diff(cost.peak_bytes(everything, SCHEME, num_devices=2)) >= 0).all()


def test_a_pack_costs_its_sequences_and_one_overhead(cost):
    lengths = [500, 20, 3000]
    parts = cost.sequence_times_s(np.array(lengths), SCHEME).sum()
    assert cost.time_s(lengths, SCHEME) == pytest.approx(parts + cost.overhead_s(SCHEME))


def test_the_curve_is_what_the_forest_makes_of_the_fit_inside_the_profile_but_for_never_falling():
    tokens = np.array([sum(r.lengths) for r in NOISY], dtype=float)
    squares = np.array([sum(n * n for n in r.lengths) for r in NOISY], dtype=float)
    base = np.array([1e-3, 1e-5, 1e-8])
    ratios = np.array([r.time_s for r in NOISY]) / (base[0] + base[1] * tokens + base[2] * squares)
    forest = grow_forest(np.stack([tokens, squares], axis=1), ratios)
    curve = make_curve(forest, num_powers=2, last=LONGEST, base=base, polynomial=np.zeros(2))
    lengths = np.arange(1.0, LONGEST + 1)
    forest_s = forest.predict(np.stack([lengths, lengths**2], axis=1)) * polyval(lengths, base)
    assert np.isclose(curve(lengths), np.maximum.accumulate(forest_s), rtol=BETWEEN_LENGTHS).all()
    rising = forest_s >= np.maximum.accumulate(forest_s)
    assert rising.mean() > 0.3
    assert np.isclose(curve(lengths), forest_s, rtol=1e-9)[rising].mean() > 0.9


def test_between_the_doublings_of_a_profile_costs_are_near_what_was_not_measured():
    """Equal where times are as the fit assumes, within 5 % where attention grows faster than l^2."""
    between = np.array([45, 90, 180, 700, 1100, 1500, 2900, 3700], dtype=float)
    for worst, seconds in (
        (1e-6, lambda n: 1e-3 + 1e-5 * n + 1e-8 * n**2),
        (0.05, lambda n: 2e-3 + 1e-5 * n + 3e-9 * n**2.15),
    ):
        packs = [(32 * 2**k,) for k in range(8)] + [(32 * 2**k,) * (4096 // (32 * 2**k)) for k in range(0, 7, 2)]
        times_s = [sum(seconds(n) - seconds(0) for n in lengths) + seconds(0) for lengths in packs]
        measured = [replace(row(lengths), time_s=time_s) for lengths, time_s in zip(packs, times_s)]
        learned = learn(table(measured))
        errors = (learned.sequence_times_s(between) + learned.overhead_s) / seconds(between) - 1
        assert np.abs(errors).max() <= worst, errors


def test_beyond_the_profile_the_polynomial_decides():
    exact = learn(table([row(lengths) for lengths in MANY_LENGTHS]))
    far = np.array([10 * LONGEST, 100 * LONGEST], dtype=float)
    assert exact.sequence_times_s(far) == pytest.approx(1e-8 * far**2 + 1e-5 * far, rel=1e-3)


@pytest.mark.parametrize("coefficients", [(2.0, 3.0), (1.0, 0.5, 0.1), (4.0, 1.0, 0.2, 0.01), (0.0, 0.0, 0.0, 1.0)])
def test_akaike_finds_the_order_of_an_exact_polynomial(coefficients):
    x = np.linspace(1, 40, 12)
    found = choose_polynomial(x, np.polynomial.polynomial.polyval(x, coefficients))
    assert len(found) == len(coefficients)
    assert found == pytest.approx(coefficients, rel=1e-5, abs=1e-6)


def test_akaike_is_the_textbook_criterion_for_few_points():
    x, y = np.array([1.0, 2.0, 3.0, 5.0]), np.array([1.0, 2.3, 2.9, 5.2])
    weights, criterion = fit_polynomial(x, y, order=1)
    errors = (weights[0] + weights[1] * x) / y - 1
    assert criterion == pytest.approx(4 * np.log(np.mean(errors**2)) + 2 * 2 + 2 * 2 * 3 / (4 - 2 - 1))
    assert fit_polynomial(x, y, order=2)[1] == np.inf


def test_polynomials_never_bend_down():
    x = np.linspace(1, 10, 10)
    assert (choose_polynomial(x, 20 * x - x**2) >= 0).all()


def test_the_margin_is_left_free_and_every_size_is_judged_alone(cost):
    most = cost.max_tokens(SCHEME, num_devices=2)
    limit = CLUSTER.device.memory_bytes * (1 - MEMORY_MARGIN)
    before = cost.peak_bytes([most, most + 1], SCHEME, num_devices=2)
    assert before[0] <= limit < before[1]
    cost.peak_bytes(10**12, SCHEME, num_devices=2)  # what does not fit leaves no mark on what follows
    assert cost.max_tokens(SCHEME, num_devices=2) == most
    assert cost.peak_bytes([most, most + 1], SCHEME, num_devices=2).tolist() == before.tolist()


def test_the_same_profile_always_teaches_the_same(cost):
    again = HybridCost(table(NOISY), model=MODEL, cluster=CLUSTER)
    lengths = np.arange(1, 10_000, 7)
    assert again.sequence_times_s(lengths, SCHEME).tolist() == cost.sequence_times_s(lengths, SCHEME).tolist()


def test_profiles_of_other_depths_are_refused_since_layers_are_no_feature():
    deeper = replace(MODEL, num_layers=MODEL.num_layers + 1)
    with pytest.raises(InputError, match="profile is of model"):
        HybridCost(table(NOISY), model=deeper, cluster=CLUSTER)


def test_too_few_lone_sequences_are_refused():
    with pytest.raises(InputError, match="at least 3 measured points, there are 1"):
        learn(table([row(lengths) for lengths in [(64,), (64, 64), (128,) * 4, (32,) * 8]]))


def test_a_missing_forest_names_the_extra_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'lengthwise\[learned\]'"):
        learn(table(NOISY))
