"""Errors are those of predictions for rows that the model has not seen."""

import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.accuracy import leave_out_errors
from lengthwise.cost.profiled.fitted import fit
from tests.cost.profiles import CLUSTER, MANY_LENGTHS, MODEL, row, table

EXACT = [row(lengths) for lengths in MANY_LENGTHS[2:9]]


def test_a_fit_predicts_unseen_rows_of_its_own_form():
    analytic, fitted, hybrid = leave_out_errors(table(EXACT), model=MODEL, cluster=CLUSTER)
    assert [errors.name for errors in (analytic, fitted, hybrid)] == ["analytic", "fitted", "hybrid"]
    assert fitted.worst < 1e-6
    assert hybrid.median < 0.5
    assert {len(errors.errors) for errors in (analytic, fitted, hybrid)} == {len(EXACT)}
    cost = AnalyticCost(model=MODEL, cluster=CLUSTER, dtype="float32")
    predicted = cost.time_s(EXACT[3].lengths, dense_scheme(MODEL.num_layers))
    assert analytic.errors[3] == pytest.approx(predicted / EXACT[3].time_s - 1)


def test_no_row_helps_to_predict_itself(monkeypatch):
    monkeypatch.setattr("lengthwise.cost.profiled.monotone_curve.NUM_TREES", 2)  # the forest is not looked at here
    spoiled = [row(EXACT[0].lengths, noise=3.0), *EXACT[1:]]
    _, fitted, _ = leave_out_errors(table(spoiled), model=MODEL, cluster=CLUSTER)
    assert fitted.errors[0] == pytest.approx(1 / 3 - 1)
    assert fitted.worst == pytest.approx(2 / 3)
    alone = fit(table(spoiled[:4] + spoiled[5:])).time_s(spoiled[4].lengths)
    assert fitted.errors[4] == pytest.approx(alone / spoiled[4].time_s - 1)


def test_profiles_that_say_nothing_about_errors_are_refused():
    with pytest.raises(InputError, match="3 rows; leaving one out"):
        leave_out_errors(table(EXACT[:3]), model=MODEL, cluster=CLUSTER)
    with pytest.raises(InputError, match="profile is of model"):
        leave_out_errors(table(EXACT, model_digest="0"), model=MODEL, cluster=CLUSTER)
