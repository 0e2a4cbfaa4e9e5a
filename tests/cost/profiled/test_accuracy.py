"""Errors are those of predictions for rows that the model has not seen."""

from dataclasses import replace

import pytest

from lengthwise.cli.tables.profile_table import accuracy_document, print_accuracy, print_profile
from lengthwise.core.cost import SharedRows
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, dense_scheme, uniform_scheme
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.accuracy import (
    BEYOND,
    can_cross_validate,
    cross_validation_errors,
    extrapolations,
    leave_out_errors,
)
from lengthwise.cost.profiled.fitted import FittedCost, fit
from lengthwise.cost.profiled.hybrid import HybridCost
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


LONE = [row(lengths) for lengths in MANY_LENGTHS]
SPREAD = [row(lengths, noise=1 + 0.1 * (-1) ** n) for n, lengths in enumerate(MANY_LENGTHS)]


def test_cross_validated_errors_are_of_rows_that_no_model_has_seen_under_every_method():
    spoiled = [*LONE[:4], row(LONE[4].lengths, noise=2.0), *LONE[5:]]
    measured = replace(table(spoiled), shared=(SharedRows(degree=2, method="metp", rows=tuple(LONE)),))
    assert can_cross_validate(measured)
    errors = cross_validation_errors(measured)
    assert [(of.name, of.degree, of.method) for of in errors] == [
        ("fitted", 1, "dense"), ("hybrid", 1, "dense"), ("fitted", 2, "metp"), ("hybrid", 2, "metp"),
    ]  # fmt: skip
    assert errors[0].errors[4] == pytest.approx(-0.5, abs=0.01), "the row that is twice as slow did not teach its fold"
    assert errors[1].errors[4] == pytest.approx(-0.5, abs=0.05)
    assert errors[2].worst < 1e-6 and errors[3].worst < 0.02


def test_profiles_of_few_lone_sequences_are_not_cross_validated():
    assert not can_cross_validate(table(EXACT[:5]))
    assert not can_cross_validate(
        replace(table(LONE), shared=(SharedRows(degree=2, method="metp", rows=tuple(EXACT[:5])),))
    )


def test_beyond_the_profile_predictions_have_a_range_that_grows_with_the_length():
    exact, spread = extrapolations(table(LONE)), extrapolations(table(SPREAD))
    longest = max(max(r.lengths) for r in LONE)
    assert [answer.num_tokens for answer in exact] == [n * longest for n in BEYOND for _ in range(2)]
    for answer in exact:
        assert (answer.low_s, answer.high_s) == pytest.approx((answer.time_s,) * 2, rel=1e-3)
    for name in ("fitted", "hybrid"):
        near, far = ([a.low_s / a.time_s, 1.0, a.high_s / a.time_s] for a in spread if a.name == name)
        assert sorted(near) == near and sorted(far) == far and near[2] - near[0] > 0.005
        assert far[2] - far[0] > near[2] - near[0]


@pytest.mark.parametrize("cost_model", [FittedCost, HybridCost])
def test_ranges_of_several_methods_are_the_means_of_theirs(cost_model):
    shared = [uniform_scheme(MODEL.num_layers, degree=2, method=m) for m in (Method.ULYSSES, Method.RING)]
    cost = cost_model([(shared[0], table(LONE)), (shared[1], table(SPREAD))], model=MODEL, cluster=CLUSTER)
    mixed = replace(shared[0], methods=(Method.RING,) + (Method.ULYSSES,) * (MODEL.num_layers - 1))
    assert cost.longest(mixed) == max(max(r.lengths) for r in LONE)
    pack, share = (4 * cost.longest(mixed),), 1 / MODEL.num_layers
    (low, high), (low_of_ring, high_of_ring) = (cost.time_range_s(pack, scheme) for scheme in shared)
    expected = low + share * (low_of_ring - low), high + share * (high_of_ring - high)
    assert cost.time_range_s(pack, mixed) == pytest.approx(expected)
    assert expected[0] < cost.time_s(pack, mixed) < expected[1]


def test_tables_print_cross_validated_errors_and_bars_beyond(capsys):
    measured = replace(table(SPREAD), shared=(SharedRows(degree=2, method="metp", rows=tuple(LONE)),))
    errors, beyond = cross_validation_errors(measured), extrapolations(measured)
    print_accuracy(errors, beyond)
    out = capsys.readouterr().out
    assert "8,192" in out and "metp" in out and "hybrid" in out and "%" in out
    document = accuracy_document(errors, beyond)
    assert len(document["cross_validation"]) == 4 and len(document["beyond"]) == 8
    assert accuracy_document((), ()) == {}


@pytest.mark.parametrize("cost_model", [FittedCost, HybridCost])
def test_the_largest_pack_is_the_largest_that_was_measured_under_every_method(cost_model):
    shared = [uniform_scheme(MODEL.num_layers, degree=2, method=m) for m in (Method.ULYSSES, Method.RING)]
    few = [r for r in LONE if sum(r.lengths) < 4096]
    cost = cost_model([(shared[0], table(LONE)), (shared[1], table(few))], model=MODEL, cluster=CLUSTER)
    mixed = replace(shared[0], methods=(Method.RING,) + (Method.ULYSSES,) * (MODEL.num_layers - 1))
    most = [max(sum(r.lengths) for r in rows) for rows in (LONE, few, few)]
    assert [cost.largest_pack(scheme) for scheme in (*shared, mixed)] == most and most[0] > most[1]


@pytest.mark.parametrize(("share", "is_said"), [(0.35, True), (0.45, False), (0.9, False)])
def test_packs_that_ranks_shared_in_less_than_a_share_of_the_time_alone_are_said_to_be_measured_wrongly(
    share, is_said, caplog, tmp_path
):
    shared = [replace(r, time_s=r.time_s * (share if len(r.lengths) > 1 else 0.6)) for r in LONE]
    measured = replace(table(LONE), shared=(SharedRows(degree=2, method="ulysses", rows=tuple(shared)),))
    print_profile(measured, fit(measured), tmp_path / "profile.json", ())
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) is is_said
    assert not said or said[0].startswith(
        "64 x 64, 8 x 512, 2 x 2,048, 1 x 1,024 + 1 x 512 + 1 x 64 took less than one"
    )
