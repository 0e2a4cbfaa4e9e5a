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
"""Of the presets on systems with attention kernels of today; the worst of runs, for Hydraulis' rows are of fits."""


@pytest.fixture(scope="module")
def calibration():
    sys.path.insert(0, str(FOLDER))
    try:
        import calibration

        yield calibration
    finally:
        sys.path.remove(str(FOLDER))


def test_every_row_has_a_source_and_there_are_enough_of_each_chip(calibration):
    rows = calibration.read_rows()
    published = [row for row in rows if row.system != "hydraulis"]
    assert len(published) >= 60
    assert {row.source for row in rows} == set(calibration.SOURCES)
    assert all(len({row.system for row in published if row.chip == chip}) >= 3 for chip in ("A100", "H100"))


def test_only_rows_of_old_kernels_and_of_no_training_run_are_left_out_of_the_goals(calibration):
    rows = calibration.read_rows()
    apart = [row for row in rows if row.not_modelled]
    assert all(row.is_old or row.system == "hydraulis" for row in apart)
    for row in apart:
        if row.is_old:
            _, attention_s, *_ = row.parts
            assert attention_s > 0.04 * sum(row.parts[:3]), "attention matters"
    assert sum(not row.not_modelled for row in rows) >= 70


@pytest.mark.parametrize("chip", ["A100", "H100"])
def test_presets_predict_what_systems_with_kernels_of_today_measured(calibration, chip):
    rows = [row for row in calibration.read_rows() if row.chip == chip and not row.is_old]
    constants = calibration.shipped(chip, calibration.START)
    missed = np.abs([row.error(constants) for row in rows])
    runs = [miss for row, miss in zip(rows, missed) if row.system != "hydraulis"]
    assert np.median(missed) <= MEDIAN and max(runs) <= WORST


def test_a_row_is_linear_in_the_reciprocals_of_the_shares(calibration):
    """What a fit takes for a prediction is what costs with its constants say."""
    constants = calibration.Constants(
        matmul_share=0.5, matmul_half_size=700.0, attention_share=0.3, old_attention_share=0.2
    )
    for row in calibration.read_rows():
        if row.system == "hydraulis":
            cost = AnalyticCost(model=row.model, cluster=row._cluster(constants.on(row.device)))
            seconds = cost.time_s(row.lengths, row.scheme) * row.scheme.num_stages
            assert row.predicted(constants) == pytest.approx(row.device_tokens / seconds, rel=1e-6)


@pytest.mark.parametrize(("chip", "device", "old_share"), [("A100", "A800-80GB", 0.298), ("H100", "H100-80GB", 0.168)])
def test_nine_of_ten_predictions_are_within_the_error_that_the_preset_states(calibration, chip, device, old_share):
    rows = [row for row in calibration.read_rows() if row.chip == chip]
    constants = calibration.shipped(chip, replace(calibration.START, old_attention_share=old_share))
    missed = np.abs([row.error(constants) for row in rows])
    assert np.quantile(missed, 0.9) == pytest.approx(DEVICES[device].speed_error, abs=0.01)
