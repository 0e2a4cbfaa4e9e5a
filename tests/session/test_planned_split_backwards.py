"""Prepared models whose plans split backwards, from costs that are measured, train what one device trains."""

from dataclasses import replace

import numpy as np
import pytest

import lengthwise as lw
from lengthwise.config.prepare_options import read_options
from lengthwise.config.run_config import load
from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import SPLIT_BACKWARD, LayerTable
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import cluster_preset
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.session.stock_planning import StockLayers, stock_planner
from tests.cost.profiled.test_dual_layer import PACKS, row, table
from tests.runtime.harness import with_check
from tests.runtime.loop.runs import in_double
from tests.session import models
from tests.session.loops import as_started_by_torchrun, noted_schemes, step_through, weights_of
from tests.session.test_planned_stages import STAGED, build, items_of, loop_alone
from tests.session.test_planning import TWO_SEQUENCES
from tests.session.test_prepare import EXACT, OPTIONS, assert_equal_weights

LAYERS = 6
SPLIT_ROWS = [
    replace(row(lengths), split_backward=True, weights_s=1e-6 * sum(lengths), kept_bytes=900 * sum(lengths))
    for lengths in PACKS
]
COST = DualLayerCost(table([*map(row, PACKS), *SPLIT_ROWS]), cluster=cluster_preset("4xcpu"))


def scheme_of(stages, recomputed=0, zero_bubble=True):
    scheme = uniform_scheme(LAYERS, degree=1, stages=stages, method=Method.DENSE, recomputed=recomputed)
    return replace(scheme, zero_bubble=zero_bubble)


def test_what_may_wait_is_what_was_measured_of_the_stage_with_the_fewest_such_layers():
    lengths = np.array([100, 1000])
    np.testing.assert_allclose(COST.weight_times_s(lengths, scheme_of(2)), 3 * 1e-6 * lengths)
    uneven = replace(scheme_of(2), stage_layers=(2, 4))
    np.testing.assert_allclose(COST.weight_times_s(lengths, uneven), 4 * 1e-6 * lengths)
    some = replace(scheme_of(3), recompute=(False, False, True, False, False, True))
    np.testing.assert_allclose(COST.weight_times_s(lengths, some), 1e-6 * lengths)
    assert COST.time_s([100], scheme_of(2)) == COST.time_s([100], scheme_of(2, zero_bubble=False))


def test_a_stage_holds_as_many_micro_batches_as_there_are_stages_with_what_split_backwards_keep():
    tokens, kept, split = 1000, 864, 900  # bytes a token that a forward keeps of a layer, and a split backward
    peaks = [
        [COST.stage_state(tokens, scheme, stage, num_devices=3)[1] for stage in range(3)]
        for scheme in (scheme_of(3), scheme_of(3, zero_bubble=False))
    ]
    more = 2 * 2 * split + 2 * (split - kept)  # of two layers of two micro-batches, and what another has to add
    assert peaks[0][2] - peaks[1][2] == pytest.approx(more * tokens, rel=1e-3)
    assert peaks[0][0] == peaks[1][0], "the first stage splits nothing"


@pytest.mark.parametrize("is_measured", [True, False])
def test_models_that_transformers_computes_are_planned_with_split_backwards_where_these_were_measured(is_measured):
    config = load(None, ["plan.local_sequences=true"])
    cost = COST if is_measured else DualLayerCost(table([*map(row, PACKS)]), cluster=COST.cluster)
    layers, options = StockLayers(num_layers=LAYERS, objective="next-token"), read_options({})
    planner = stock_planner(
        config, cost, layers, options=options, cluster=cost.cluster, corpus=TWO_SEQUENCES, max_stages=None
    )
    assert any(candidate.scheme.zero_bubble for candidate in planner.problem.candidates) == is_measured
    assert not planner.problem.local_sequences, "which their attention cannot have"


def train(family, options):
    """Losses, weights, and stages and split backwards of every micro-batch's scheme."""
    as_started_by_torchrun()
    with in_double():
        model = build(family)
        run = lw.prepare(model, items_of(family), **options)
        noted = noted_schemes(run, lambda scheme: (scheme.num_stages, scheme.zero_bubble))
        losses, *_ = step_through(run, run.wrapped_model.loss_of)
        run.close()
    return losses, weights_of(model), set(noted.values())


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [("plain", 3), *(pytest.param(name, 2, marks=pytest.mark.deep) for name in ("llama", "bert"))],
)
def test_planned_split_backwards_train_what_one_device_trains(ranks, family, num_ranks):
    expected_losses, expected = loop_alone(family)
    for losses, weights, schemes in ranks(num_ranks).run(with_check, train, family, STAGED | {"zero_bubble": "all"}):
        assert schemes and all(splits for stages, splits in schemes if stages > 1)
        np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
        assert_equal_weights(weights, expected)
    if family != "plain":  # what may not split is also seen in costs, below
        whole = ranks(num_ranks).run(train, family, STAGED | {"zero_bubble": "none", "steps": 1})
        assert all(not splits for *_, schemes in whole for _, splits in schemes)


def costs_of(path, **options):
    """Whether plans may split backwards, and the seconds of weights of 60 tokens on two stages, and of all."""
    as_started_by_torchrun()
    options = OPTIONS | {"steps": 1, "verbose": False, "profile": path, "max_stages": 2} | options
    run = lw.prepare(models.gpt(), models.rows(), **options)
    cost, scheme = run.planner.planner.problem.cost, run.planner.planner.problem.candidates[-1].scheme
    splits = any(candidate.scheme.zero_bubble for candidate in run.planner.planner.problem.candidates)
    lengths, num_layers = np.array([60]), scheme.num_layers
    staged = replace(
        uniform_scheme(num_layers, degree=1, stages=2, method=Method.DENSE, recomputed=0), zero_bubble=True
    )
    times_s = float(cost.weight_times_s(lengths, staged)[0]) if splits else 0.0, float(cost.time_s([60], staged))
    run.close()
    return splits, run.wrapped_model.layers.may_split, *times_s


@pytest.mark.deep
def test_what_split_backwards_leave_is_measured_once_and_left_out_where_they_may_not_be(ranks, tmp_path):
    path = tmp_path / "profile.json"
    for splits, may_split, weights_s, time_s in ranks(2).run(costs_of, path):
        assert splits and may_split and 0 <= weights_s < time_s, "of so few tokens most is the same for any number"
    measured = path.read_text()
    split = LayerTable.load(path).of_degree(1, variant=SPLIT_BACKWARD)
    assert split and all(row.weights_s > 0 and row.kept_bytes > 1 for row in split)
    for options, expected in (({}, True), ({"zero_bubble": "none"}, False)):
        assert {found[0] for found in ranks(2).run(costs_of, path, **options)} == {expected}
        assert path.read_text() == measured


@pytest.mark.deep  # by default: with whole weights above, and stages that gather theirs in tests/runtime/loop
def test_backwards_split_where_stages_gather_their_weights(ranks):
    assert {found[:2] for found in ranks(2).run(costs_of, None, weights="by-layer")} == {(True, True)}


def refused(**options):
    as_started_by_torchrun()
    with pytest.raises(InputError) as refusal:
        lw.prepare(models.gpt(), models.rows(), **OPTIONS | {"verbose": False, "zero_bubble": "all", **options})
    return str(refusal.value)


def test_asking_for_split_backwards_where_there_can_be_none_is_refused(ranks):
    for said in ranks(2).run(refused, compile=True, compile_backend="eager"):
        assert said == "zero_bubble='all', and backwards of compiled layers are whole; leave one of the two out"
