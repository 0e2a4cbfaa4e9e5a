"""Prepared models whose plans cut micro-batches into slices, where costs price them, train what one device trains."""

from dataclasses import replace

import numpy as np
import pytest

import lengthwise as lw
from lengthwise.config.prepare_options import read_options
from lengthwise.config.run_config import load
from lengthwise.core.errors import InfeasibleError, LengthwiseError
from lengthwise.core.layer_profile import AttentionSizes
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.sliced_passes import largest_share
from lengthwise.core.specs import cluster_preset
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.loop.prepared_engine import PreparedEngine
from lengthwise.session.stock_planning import StockLayers, stock_planner
from tests.cost.profiled.test_dual_layer import PACKS, row, table
from tests.plan.costs import SimpleCost
from tests.runtime.harness import with_check
from tests.runtime.loop.runs import in_double
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_planned_stages import STAGED, build, items_of, loop_alone
from tests.session.test_planning import TWO_SEQUENCES
from tests.session.test_prepare import EXACT, OPTIONS, assert_equal_weights

LAYERS = 6
SIZES = AttentionSizes(num_heads=8, num_kv_heads=2, head_size=10)
WHOLE = DualLayerCost(table([*map(row, PACKS)]), cluster=cluster_preset("4xcpu"))
COST = WHOLE.with_attention(SIZES)


class SlicesFitMore(SimpleCost):
    """A device of a pipeline holds more tokens in proportion to its stages, if it computes them in slices."""

    prices_slices = True

    def max_tokens(self, scheme, *, num_devices):
        held = super().max_tokens(scheme, num_devices=num_devices)
        return held * scheme.num_stages if scheme.slices > 1 else held


SLICED = STAGED | {"cost": SlicesFitMore(capacity=40, loss=0.4, c_s=0.05), "policy": "auto"}
"""A device holds 40 tokens, and the longest rows have 64: only slices on stages fit them."""


def scheme_of(stages, slices=1, recomputed=0):
    scheme = uniform_scheme(LAYERS, degree=1, stages=stages, method=Method.DENSE, recomputed=recomputed)
    return replace(scheme, slices=slices)


def test_slices_take_what_their_sequences_take_and_every_launch_again():
    lengths = np.array([100, 4000])
    added_s = COST.sequence_times_s(lengths, scheme_of(2, 4)) - WHOLE.sequence_times_s(lengths, scheme_of(2))
    np.testing.assert_allclose(added_s / lengths, added_s[0] / 100)
    assert 0 < added_s[0] < 0.2 * float(COST.sequence_times_s(lengths, scheme_of(2))[0])
    assert COST.overhead_s(scheme_of(2, 4)) == pytest.approx(4 * WHOLE.overhead_s(scheme_of(2)))
    assert COST.prices_slices and not WHOLE.prices_slices


@pytest.mark.parametrize(("recomputed", "copies"), [(0, 3 * 4 + 4), (LAYERS, 3 * 8 + 4)])
def test_a_stage_keeps_a_micro_batch_once_and_its_keys_and_values(recomputed, copies):
    tokens, stages = 10_000, 2
    kept, inputs = (800, 64) if not recomputed else (0, 64)
    scheme, share = scheme_of(stages, 16, recomputed), largest_share(16)
    _, bytes_of_slices = COST.stage_state(tokens, scheme, 0, num_devices=2)
    saved = (1 + share) * (3 * (kept + inputs) + inputs)
    keys = 2 * SIZES.num_kv_heads * SIZES.head_size * copies
    assert saved + keys < bytes_of_slices / tokens < saved + keys + share * 2500
    _, of_whole = COST.stage_state(tokens, scheme_of(stages, 1, recomputed), 0, num_devices=2)
    assert recomputed or bytes_of_slices < 0.8 * of_whole


@pytest.mark.parametrize(("slices", "attention"), [("auto", SIZES), ("auto", None), ("none", SIZES)])
def test_models_that_transformers_computes_are_planned_in_slices_where_these_are_priced(slices, attention):
    config, cost = load(None, []), WHOLE.with_attention(attention)
    layers, options = StockLayers(num_layers=LAYERS, objective="next-token"), read_options({"slices": slices})
    planner = stock_planner(
        config, cost, layers, options=options, cluster=cost.cluster, corpus=TWO_SEQUENCES, max_stages=None
    )
    assert planner.problem.candidates
    assert not (slices == "none" or attention is None) or not any(
        candidate.scheme.slices > 1 for candidate in planner.problem.candidates
    )


def train(family, options):
    """Losses, weights, and of every micro-batch its stages and slices."""
    as_started_by_torchrun()
    with in_double():
        model, seen = build(family), set()
        run = lw.prepare(model, items_of(family), **options)
        plan_of = run.planner

        def noted(batch):
            plan = plan_of(batch)
            seen.update((p.scheme.num_stages, len(m.slices)) for p in plan.pipelines for m in p.micro_batches)
            return plan

        run.planner = noted
        losses, *_ = step_through(run, run.wrapped_model.loss_of)
        run.close()
    return losses, weights_of(model), seen


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [pytest.param("plain", 2, marks=pytest.mark.deep), ("llama", 2), pytest.param("gpt2", 3, marks=pytest.mark.deep)],
)
def test_planned_slices_train_what_one_device_trains(ranks, family, num_ranks):
    expected_losses, expected = loop_alone(family)
    for losses, weights, seen in ranks(num_ranks).run(with_check, train, family, SLICED | {"slices": "auto"}):
        assert any(slices > 1 for _, slices in seen) and all(stages > 1 for stages, slices in seen if slices)
        np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
        assert_equal_weights(weights, expected)


def validated(family):
    """The validation loss of the first step's plan, and whether that has slices."""
    as_started_by_torchrun()
    with in_double():
        run = lw.prepare(build(family), items_of(family), **SLICED | {"slices": "auto"})
        plan = run.planner(next(run.stream))
        loss = PreparedEngine(run, validation=run.collator).mean_loss([plan], run.collator.source)
        run.close()
    return loss, any(micro_batch.slices for pipeline in plan.pipelines for micro_batch in pipeline.micro_batches)


def test_a_plan_in_slices_validates_whole_micro_batches(ranks):
    expected, _ = loop_alone("llama")
    for loss, has_slices in ranks(2).run(validated, "llama"):
        assert has_slices and loss == pytest.approx(expected[0], rel=EXACT)


def refused(family, options, error):
    as_started_by_torchrun()
    with pytest.raises(error) as refusal:
        lw.prepare(build(family), items_of(family), **options)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("plain", {}),
        pytest.param("plain", {"slices": "none"}, marks=pytest.mark.deep),
        ("bert", {"slices": "auto"}),
        pytest.param("plain", {"slices": "auto", "compile": True, "compile_backend": "eager"}, marks=pytest.mark.deep),
    ],
)
def test_micro_batches_are_whole_by_default_and_where_slices_are_not_exact(ranks, family, options):
    for said in ranks(2).run(refused, family, SLICED | options, InfeasibleError):
        assert "64 tokens" in said


def loop_over_sequences(how):
    """What a loop hears that makes a loss of whole sequences of a slice, as it may of others."""
    as_started_by_torchrun()
    with in_double():
        model = build("plain")
        run = lw.prepare(model, models.rows(), **SLICED | {"slices": "auto"})
        step = next(run.steps())
        try:
            for micro_batch in step:
                is_slice = micro_batch.shard.part is not None
                logits, loss = model(**micro_batch.inputs)[:2]
                if how == "per_sequence" and is_slice:
                    loss = micro_batch.per_sequence(logits[0].square().mean(-1)).mean()
                step.backward(loss, mean_over="units" if is_slice else None)
            step.update()
        except LengthwiseError as error:
            said = str(error)
            if not step.is_over:
                step.leave()
        run.close()
    return said


@pytest.mark.parametrize("how", ["per_sequence", pytest.param("units", marks=pytest.mark.deep)])
def test_losses_of_whole_sequences_are_refused_in_a_slice(ranks, how):
    *_, said = ranks(2).run(loop_over_sequences, how)
    assert "tokens of some sequences" in said and said.endswith("leave slices='auto' out of prepare(...)")


def priced(**options):
    """Whether plans may have slices, and what a layer attends with, by costs that are measured."""
    as_started_by_torchrun()
    options = OPTIONS | {"steps": 1, "verbose": False, "profile": None, "max_stages": 2} | options
    run = lw.prepare(models.gpt(), models.rows(), **options)
    cost, may_slice = run.planner.planner.problem.cost, run.wrapped_model.layers.may_slice
    run.close()
    return may_slice, cost.prices_slices, cost.base.attention


def test_slices_are_compared_and_priced_where_plans_may_have_them(ranks, tmp_path):
    for may_slice, is_priced, attention in ranks(2).run(priced, profile=tmp_path / "profile.json", slices="auto"):
        assert may_slice and is_priced and attention == AttentionSizes(num_heads=4, num_kv_heads=4, head_size=6)


@pytest.mark.deep  # by default: micro-batches are whole where nobody asks for slices, above
def test_slices_are_neither_compared_nor_priced_where_nobody_asks_for_them(ranks, tmp_path):
    assert set(ranks(2).run(priced, profile=tmp_path / "profile.json")) == {(False, False, None)}
