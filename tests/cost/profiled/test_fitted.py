"""Fits find the coefficients that made a profile, say how far to trust them, and know what was profiled."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.core.cost import CostError, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, dense_scheme, homogeneous, uniform_scheme
from lengthwise.cost.profiled.fitted import FittedCost, fit, memory_lines
from lengthwise.cost.profiled.hybrid import HybridCost
from tests.cost.profiles import CLUSTER, MANY_LENGTHS, MODEL, row, scheme_of, table

SCHEME = dense_scheme(MODEL.num_layers)
COST = FittedCost(table(), model=MODEL, cluster=CLUSTER)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 1000))
def test_times_and_bytes_grow_with_every_length(lengths, more):
    longer = [lengths[0] + more, *lengths[1:]]
    assert COST.time_s(longer, SCHEME) > COST.time_s(lengths, SCHEME)
    few, many = COST.peak_bytes([sum(lengths), sum(longer)], SCHEME, num_devices=2)
    assert few <= many


def test_a_pack_costs_its_sequences_and_one_overhead():
    lengths = [500, 20, 3000]
    parts = COST.sequence_times_s(np.array(lengths), SCHEME).sum()
    assert COST.time_s(lengths, SCHEME) == pytest.approx(parts + COST.overhead_s(SCHEME))
    assert COST.time_s([3520], SCHEME) > COST.time_s(lengths, SCHEME)  # attention ends with a sequence


def test_max_tokens_is_the_most_that_fits():
    most = COST.max_tokens(SCHEME, num_devices=2)
    peaks = COST.peak_bytes([most, most + 1], SCHEME, num_devices=2)
    assert peaks[0] <= CLUSTER.device.memory_bytes < peaks[1]


def test_fitting_finds_the_coefficients_that_made_the_rows():
    found = fit(table())
    assert (found.a_s, found.b_s, found.c_s) == pytest.approx((1e-8, 1e-5, 2e-3), rel=1e-6)
    assert found.kept_bytes(np.array([100, 1e6])) == pytest.approx([1000 + 64 * 100, 1000 + 64e6], rel=1e-6)
    assert found.bytes_per_token == pytest.approx(64, rel=1e-6)
    assert found.median_error < 1e-9


@pytest.mark.parametrize(
    ("packs", "words"),
    [
        ([(64,)] * 3, "3 rows, 1 of them different; fitting a, b and c needs at least 3"),
        ([(64,), (64,), (1024,)], "3 rows, 2 of them different"),
        ([(1024, 64), (64, 1024), (4096,)], "3 rows, 2 of them different"),
        ([(64,), (65,), (66,)], "packs of 64 to 66 tokens alone; fitting a, b and c needs one of at least 1.5 times"),
        ([(64,), (256,)], "2 rows, 2 of them different"),
    ],
)
def test_rows_that_hardly_differ_are_refused_for_every_scheme(packs, words):
    alike = tuple(map(row, packs))
    with pytest.raises(InputError, match=f"the profile has {words}.*lengthwise profile"):
        FittedCost(table(alike), model=MODEL, cluster=CLUSTER)
    with pytest.raises(InputError, match=words):
        HybridCost(table(alike), model=MODEL, cluster=CLUSTER)


def test_sequences_of_one_length_leave_open_whether_times_grow_with_its_square():
    """Packs of 1, 2 and 4 sequences of 64 tokens: a sequence of 5,000 may cost 78 times as many seconds or 6,100."""
    found = fit(table([row((64,) * number) for number in (1, 2, 4)]))
    truth_s = 1e-8 * 64**2 + 1e-5 * 64
    low_s, high_s = found.confidence([5000])
    assert low_s <= 1.01 * (truth_s * 5000 / 64 + 2e-3) and high_s >= 0.99 * truth_s * (5000 / 64) ** 2
    low_s, high_s = found.confidence([64] * 3)
    assert low_s == pytest.approx(high_s) == pytest.approx(3 * truth_s + 2e-3)


def test_bytes_beyond_the_measured_lengths_grow_as_at_the_longest_ones():
    """Of a peak that gathered weights decide up to 3,000 tokens: most rows have the same bytes."""
    truth = {length: max(1_000_000, 64 * length + 800_000) for length in (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
    found = fit(table([replace(row((length,)), kept_bytes=kept) for length, kept in truth.items()]))
    assert found.kept_bytes(np.array([4096, 100_000])) == pytest.approx([64 * 4096 + 800_000, 64e5 + 8e5], rel=1e-6)


@example([(319, 1), (11_189, 15_183_371_299)])  # the sum of two large parts that cancel
@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**12)), min_size=1, max_size=9))
def test_no_measured_row_needs_more_bytes_than_the_model_says(rows):
    tokens, sizes = np.array(rows, dtype=float).T
    lines = memory_lines(tokens, sizes)
    assert (np.maximum.reduce([line.at(tokens) for line in lines]) >= sizes * (1 - 1e-9)).all()
    assert min(line.per_token for line in lines) > 0


def test_one_spoiled_row_does_not_pull_the_others_along():
    rows = [row(lengths) for lengths in [(64,), (128,), (256,), (512,), (1024,), (4096,), (256,) * 16, (64,) * 64]]
    found = fit(table([replace(rows[0], time_s=3 * rows[0].time_s), *rows[1:]]))
    assert (found.a_s, found.b_s) == pytest.approx((1e-8, 1e-5), rel=0.02)
    assert found.median_error < 0.01


def test_fitted_coefficients_are_never_negative():
    rows = [row(lengths) for lengths in MANY_LENGTHS]
    concave = [replace(r, time_s=1e-5 * sum(r.lengths) * (1 - 1e-5 * sum(r.lengths))) for r in rows]
    found = fit(table(concave))
    assert min(found.a_s, found.b_s, found.c_s) >= 0
    assert found.median_error > 0


def test_noise_shows_in_the_residuals():
    rows = [row(lengths, noise=1.1 if n % 2 else 0.9) for n, lengths in enumerate(MANY_LENGTHS)]
    assert 0.02 < fit(table(rows)).median_error < 0.2


def test_what_is_off_alike_in_all_rows_is_no_error_of_their_ratios():
    exact = FittedCost(table(), model=MODEL, cluster=CLUSTER).error
    assert exact.of_times < 1e-6 and exact.of_ratios < 1e-6
    alike, apart = CostError.of([0.3] * 6), CostError.of([0.1, -0.1] * 3)
    assert alike.of_times == pytest.approx(0.3) and alike.of_ratios < 1e-9
    assert apart.of_times == pytest.approx(0.1) and apart.of_ratios == pytest.approx(np.log(1.1 / 0.9))


def test_confidence_is_a_point_where_rows_agree_and_a_range_that_holds_the_prediction_where_not():
    exact = fit(table([row(lengths) for lengths in MANY_LENGTHS]))
    assert exact.confidence([1000, 50]) == pytest.approx((exact.time_s([1000, 50]),) * 2, rel=1e-6)
    noisy = fit(table([row(x, noise=1 + 0.1 * (-1) ** n) for n, x in enumerate(MANY_LENGTHS)]))
    for lengths in ([10], [1000, 50], [100_000]):
        low, high = noisy.confidence(lengths)
        assert low <= noisy.time_s(lengths) <= high
    widths = [(high - low) / noisy.time_s([n]) for n in (1000, 100_000) for low, high in [noisy.confidence([n])]]
    assert 0 < widths[0] < widths[1]  # the longest row alone decides far beyond it


def test_confidence_comes_from_fits_that_miss_one_row_each():
    rows = [row(lengths, noise=1 + 0.1 * (-1) ** n) for n, lengths in enumerate(MANY_LENGTHS)]
    found = fit(table(rows))
    without = fit(table(rows[:2] + rows[3:]))
    assert found.left_out[2] == pytest.approx((without.a_s, without.b_s, without.c_s))
    assert len(found.left_out) == len(rows)


def test_each_profiled_scheme_has_its_own_fit():
    split = scheme_of(MODEL, Method.ULYSSES, degree=2)
    faster = table([row(lengths, b=6e-6) for lengths in MANY_LENGTHS], update_s=0.05)
    cost = FittedCost([(SCHEME, table()), (split, faster)], model=MODEL, cluster=CLUSTER)
    dense_s, split_s = (float(cost.sequence_times_s(np.array([1000]), s)[0]) for s in (SCHEME, split))
    assert (dense_s, split_s) == pytest.approx((0.02, 0.016), rel=1e-5)
    assert cost.update_s(homogeneous(SCHEME, 2)) == 0.03
    assert cost.update_s(homogeneous(split, 2)) == 0.05
    with pytest.raises(InputError, match=r"no profile of scheme <4,1> ulysses; there are: <1,1> dense, <2,1> ulysses"):
        cost.overhead_s(scheme_of(MODEL, Method.ULYSSES, degree=4))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (table(model_digest="0"), "profile is of model"),
        (table([row((64,)), row((128,))]), "2 rows"),
        ([], "at least one profile"),
        ([(SCHEME, table()), (scheme_of(MODEL, Method.RING, 2), table(dtype="bfloat16"))], "bfloat16 and float32"),
    ],
)
def test_profiles_that_cannot_be_fitted_are_refused(tables, message):
    with pytest.raises(InputError, match=message):
        FittedCost(tables, model=MODEL, cluster=CLUSTER)


def test_a_profile_answers_for_its_own_recompute_setting_only():
    cost = FittedCost(table(recompute=True), model=MODEL, cluster=CLUSTER)
    assert cost.overhead_s(dense_scheme(MODEL.num_layers, recompute=True)) > 0
    for ask in (cost.overhead_s, lambda scheme: cost.max_tokens(scheme, num_devices=2)):
        with pytest.raises(InputError, match="taken with recompute=true"):
            ask(SCHEME)
    with pytest.raises(InputError, match="no profile of scheme <1,1> dense r2"):
        cost.overhead_s(scheme_of(MODEL, Method.DENSE, 1, recomputed=2))


def test_profiles_survive_the_disk(tmp_path):
    path = tmp_path / "profile.json"
    table().save(path)
    assert ProfileTable.load(path) == table()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"schema_version": 99, "rows": []}'])
def test_files_that_are_no_profile_are_refused_with_the_way_out(text, tmp_path):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"profile"):
        ProfileTable.load(path)


def test_sequences_cost_something_even_where_a_profile_says_that_none_does():
    same = [replace(row(lengths), time_s=0.25) for lengths in MANY_LENGTHS]
    cost = FittedCost(table(same), model=MODEL, cluster=CLUSTER)
    times_s = cost.sequence_times_s(np.array([1, 10, 100]), SCHEME)
    assert (times_s > 0).all() and (np.diff(times_s) > 0).all()


@pytest.mark.parametrize("cost_model", [FittedCost, HybridCost])
def test_layers_of_several_methods_cost_the_mean_of_what_was_profiled(cost_model):
    shared = [uniform_scheme(MODEL.num_layers, degree=2, method=m) for m in (Method.ULYSSES, Method.RING)]
    slower = [row(lengths, noise=2.0) for lengths in MANY_LENGTHS]
    tables = [(SCHEME, table()), (shared[0], table()), (shared[1], replace(table(slower), update_s=7.0))]
    cost = cost_model(tables, model=MODEL, cluster=CLUSTER)
    methods = (Method.RING,) + (Method.ULYSSES,) * (MODEL.num_layers - 1)
    mixed, share = replace(shared[0], methods=methods), 1 / MODEL.num_layers
    for lengths in ([512], [64, 1024]):
        fast, slow = (cost.time_s(lengths, scheme) for scheme in shared)
        assert cost.time_s(lengths, mixed) == pytest.approx(fast + share * (slow - fast)) and slow > fast
    assert cost.update_s(homogeneous(mixed, num_devices=2)) == 7.0
    with pytest.raises(InputError, match=r"no profile of scheme .*ulysses"):
        cost.overhead_s(replace(mixed, methods=(Method.ALL_GATHER, *methods[1:])))


@pytest.mark.parametrize("cost_model", [FittedCost, HybridCost])
def test_util_tokens_of_a_profile_are_those_of_its_fit(cost_model):
    """l / (a l^2 + b l + c) is largest at sqrt(c / a), and 85 % of that at the lower root of a quadratic."""
    a, b, c = 1e-8, 1e-5, 2e-3
    cost = cost_model(table([row(lengths, a, b, c) for lengths in MANY_LENGTHS]), model=MODEL, cluster=CLUSTER)
    rate = 0.85 / (2 * (a * c) ** 0.5 + b)
    middle = 1 / rate - b
    expected = (middle - (middle**2 - 4 * a * c) ** 0.5) / (2 * a)
    assert cost.util_tokens(SCHEME) == pytest.approx(expected, rel=0.05)
