"""Presets of GPUs are near what others measured, and every public measurement says where it stands."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.device_spec import DEVICES
from lengthwise.cost.analytic.analytic_cost import AnalyticCost

FOLDER = Path(__file__).parents[2] / "benchmarks"
MEDIAN, WORST = 0.10, 0.25
"""On training runs, of presets and of constants fitted without their system; Hydraulis' rows are of fits."""
FORCED = 0.30
"""Of presets on runs whose one sequence all but fills memory."""
ROUNDED = 0.006
"""How far presets are from what is fitted: shares have two digits."""


@pytest.fixture(scope="module")
def calibration():
    sys.path.insert(0, str(FOLDER))
    try:
        import calibration

        yield calibration
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def every(calibration):
    return calibration.read_rows()


@pytest.fixture(scope="module")
def rows(every):
    """Those that presets are fitted to."""
    return [row for row in every if row.is_first]


@pytest.fixture(scope="module")
def later(every):
    return [row for row in every if not row.is_first]


@pytest.fixture(scope="module")
def memory(calibration):
    import calibration_memory

    return calibration_memory


def test_every_row_has_a_source_and_there_are_enough_of_each_chip(calibration, rows, later):
    published = [row for row in rows if row.system != "hydraulis"]
    assert min(len(published), len(later)) >= 60
    assert {row.source for row in calibration.read_rows(with_speed=False)} == set(calibration.SOURCES)
    assert all(len({row.system for row in published if row.chip == chip}) >= 3 for chip in ("A100", "H100"))


def test_only_fits_and_runs_that_their_own_table_contradicts_are_no_training_runs(calibration, rows):
    apart = [row for row in rows if calibration.why_not_scored(row, rows)]
    assert [row.label for row in apart if row.system != "hydraulis"] == [
        "mpt-30b, 8,192 x 1, recompute all",
        "mpt-30b, 8,192 x 1, recompute all",
        "mpt-760m, 1,024 x 48, recompute none",
        "mpt-760m, 512 x 96, recompute none",
        "mpt-1b, 2,048 x 10, recompute none",
    ]


def test_a_run_is_contradicted_by_no_better_one_that_is_faster(calibration, rows):
    (slow,) = (row for row in rows if row.num_devices == 32 and row.label.startswith("mpt-1b") and row.chip == "A100")
    peers = [row for row in rows if slow.should_be_as_fast_as(row)]
    assert sorted(row.num_devices for row in peers) == [32, 64, 128] and {row.lengths for row in peers} == {
        (2048,) * 10
    }
    assert calibration.why_not_scored(replace(slow, tokens_per_s=19_001 / 1.09), rows) == ""


def test_a_sequence_is_forced_where_its_table_takes_one_of_half_its_length_and_never_as_many_tokens(rows):
    (forced,) = (row for row in rows if row.chip == "A100" and row.system != "hydraulis" and row.is_forced(rows))
    shorter = [row for row in rows if (row.device, row.model) == (forced.device, forced.model) and row is not forced]
    assert forced.lengths == (8192,) and sorted(row.lengths for row in shorter) == [
        (512,) * 12, (1024,) * 6, (2048,) * 3, (4096,)
    ]  # fmt: skip
    twice = replace(forced, lengths=(4096, 4096))
    assert not twice.is_forced(rows) and not forced.is_forced([*shorter, twice]) and not forced.is_forced([forced])


def test_training_runs_are_predicted_by_presets_and_by_other_systems(calibration, rows):
    left_out = calibration.left_out_errors(rows)
    for chip in calibration.CHIPS:
        runs = [
            place for place, row in enumerate(rows) if row.chip == chip and not calibration.why_not_scored(row, rows)
        ]
        shipped = [rows[place].error(calibration.shipped(chip)) for place in runs]
        for missed in (np.abs(shipped), np.abs(left_out[runs])):
            assert np.median(missed) <= MEDIAN and max(missed) <= WORST, chip
        forced = [row for row in rows if row.chip == chip and row.system != "hydraulis" and row.is_forced(rows)]
        assert forced and all(abs(row.error(calibration.shipped(chip))) <= FORCED for row in forced)


def test_presets_are_what_is_fitted_to_all_rows(calibration, rows):
    """``benchmarks/calibration.md`` has both, too."""
    page = (FOLDER / "calibration.md").read_text()
    for chip, fitted in calibration.fit(rows).items():
        shipped = calibration.shipped(chip)
        for field in ("matmul_share", "attention_share", "exposed_share"):
            assert getattr(shipped, field) == pytest.approx(getattr(fitted, field), abs=ROUNDED), (chip, field)
        assert shipped.activation_passes == pytest.approx(fitted.activation_passes, abs=10 * ROUNDED)
        for name, constants in (("fitted to all", fitted), ("shipped", shipped)):
            assert f"| {name} | {' | '.join(calibration._figures(constants))} |" in page
    assert all(DEVICES[name].matmul_share == DEVICES["A100-80GB"].matmul_share for name in ("A100-40GB", "A800-80GB"))
    assert DEVICES["H200-141GB"].matmul_share == DEVICES["H100-80GB"].matmul_share


def test_a_row_is_linear_in_the_reciprocals_of_the_shares(calibration, rows):
    """What a fit takes for a prediction is what costs with its constants say, of pipelines too."""
    constants = calibration.Constants(matmul_share=0.5, activation_passes=7.0, attention_share=0.3, exposed_share=0.2)
    for row in rows:
        if row.system == "hydraulis":
            cost = AnalyticCost(model=row.model, cluster=row.cluster(constants.on(row.device)))
            seconds = cost.time_s(row.lengths, row.scheme) * row.scheme.num_stages
            assert row.predicted(constants) == pytest.approx(row.device_tokens / seconds, rel=1e-6)


def test_weights_that_move_cost_the_longer_time_and_a_share_of_the_shorter(calibration, rows):
    """Nothing hidden: the sum of both; all hidden: the longer; gradients in float32 move a third more than half."""
    row = next(row for row in rows if row.num_devices == 64 and row.label.startswith("mpt-70b, 2,048 x 2"))
    moved_s, update_s = row.parts[4], row.parts[-1]
    constants = calibration.shipped("A100")
    hidden_s, sum_s = (
        row.device_tokens / row.predicted(replace(constants, exposed_share=share)) for share in (0.0, 1.0)
    )
    assert sum_s - hidden_s == pytest.approx(moved_s) and moved_s < hidden_s - update_s
    assert replace(row, reduced_bytes=4).parts[4] == pytest.approx(moved_s * 8 / 6)


@pytest.mark.parametrize(("chip", "device"), [("A100", "A800-80GB"), ("H100", "H100-80GB")])
def test_nine_of_ten_predictions_are_within_the_error_that_the_preset_states(calibration, rows, chip, device):
    missed = np.abs([row.error(calibration.shipped(chip)) for row in rows if row.chip == chip])
    assert np.quantile(missed, 0.9) == pytest.approx(DEVICES[device].speed_error, abs=0.01)


def test_systems_that_presets_have_not_seen_are_predicted_in_the_median(calibration, every, later):
    """None of these was fitted to; what is far off has its reason on the page."""
    runs = [row for row in later if row.chip != "B200" and not calibration.why_not_scored(row, every)]
    missed = np.abs([row.error(calibration.shipped(row.chip)) for row in runs])
    assert len({row.system for row in runs}) >= 9 and len(runs) >= 75
    assert np.median(missed) <= MEDIAN / 2 and np.mean(missed <= WORST) >= 0.9
    of_nvidia = [abs(row.error(calibration.shipped("H100"))) for row in runs if row.system == "nemo"]
    assert len(of_nvidia) == 38 and max(of_nvidia) <= 0.08


def test_blackwell_has_the_share_of_products_that_is_fitted_to_its_rows(calibration, every):
    from calibration_later import blackwell_rows, fit_products

    mine = blackwell_rows(every)
    fitted = fit_products(mine)
    assert len(mine) == 9 and {row.device.name for row in mine} == {"GB200-186GB"}
    for name in ("B200-180GB", "GB200-186GB"):
        assert DEVICES[name].matmul_share == pytest.approx(fitted.matmul_share, abs=ROUNDED)
    assert max(abs(row.error(calibration.shipped("B200"))) for row in mine) <= 0.05


def test_stages_of_several_parts_wait_less(later):
    row = next(row for row in later if row.chunks == 5 and row.num_devices == 64)
    assert row.waits == pytest.approx(1 + 3 / 5 / 64)
    whole = replace(row, chunks=1)
    assert whole.waits == pytest.approx(1 + 3 / 64) and whole.parts[0] / row.parts[0] == pytest.approx(
        whole.waits / row.waits
    )


def test_ranks_that_share_tokens_beside_tensors_divide_what_tokens_cost(later):
    row = next(row for row in later if row.context == 2 and row.scheme.degree == 4)
    alone = replace(row, context=1)
    assert row.parts[0] == pytest.approx(alone.parts[0] / 2) and row.device_tokens == alone.device_tokens / 2
    assert row.parts[3] > alone.parts[3] / 2  # launches are not shared


def test_what_runs_beneath_products_is_moved_from_rest(later):
    row = next(row for row in later if row.is_overlapped and row.scheme.degree == 8 and row.scheme.num_stages > 1)
    bare = replace(row, is_overlapped=False)
    assert row.parts[3] < bare.parts[3] and row.parts[4] > bare.parts[4]
    sum_s = {name: sum(one.parts[:5]) for name, one in (("row", row), ("bare", bare))}
    handed_s = row._sent_s[1]
    assert sum_s["row"] - sum_s["bare"] == pytest.approx((row.chunks - 1) * handed_s)


def test_a_token_that_takes_longer_than_between_its_neighbours_is_told_apart(calibration, every, later):
    (apart,) = (row for row in later if row.above_chord(every) > 0.1)
    assert (apart.system, apart.lengths) == ("easycontext", (131072,))
    assert "longer a token" in calibration.why_not_scored(apart, every)
    assert replace(apart, tokens_per_s=710.0).above_chord(every) < 0


def test_peak_memory_is_near_what_is_published(calibration, memory):
    """Of tensors within a tenth; an allocator and a process hold more than these."""
    rows = [row for row in calibration.read_rows(with_speed=False) if row.memory_kind in memory.KINDS]
    ratios = {kind: [] for kind in memory.KINDS}
    for row in rows:
        if (row.system, row.device.name) != ("torchao", "B200-180GB"):  # contradicted by its own run on H100s
            ratios[row.memory_kind].append(memory.predicted_gib(row)[1] / row.memory_gib)
    assert len(rows) >= 30 and all(ratios.values())
    assert all(abs(ratio - 1) <= MEDIAN for ratio in ratios["allocated"])
    assert all(0.75 <= ratio <= 1.1 for kind in memory.KINDS for ratio in ratios[kind])
    assert np.median(np.abs(np.concatenate(list(ratios.values())) - 1)) <= MEDIAN


def test_a_longest_length_all_but_fills_the_device(calibration, memory):
    rows = [row for row in calibration.read_rows() if row.memory_kind == "longest"]
    ratios = [memory.predicted_gib(row)[1] / memory.published_gib(row) for row in rows]
    assert len(rows) == 10 and np.median(np.abs(np.array(ratios) - 1)) <= 0.15 and max(ratios) <= 1.2
