"""Models of others compute micro-batches in slices on ranks and stages, and learn what their own loops teach them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.batch import EVERY_TOKEN, NEXT_TOKEN, GlobalBatch
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.planned_micro_batch import PlannedSlice
from lengthwise.runtime.loop.planned_pipelines import in_one_piece
from lengthwise.runtime.loop.slice_limits import slice_problem
from lengthwise.runtime.verify.stage_check import check_stages
from tests.runtime.loop import memory_runs
from tests.runtime.loop.loops import (
    make_run,
    masked_mean_alone,
    model_of,
    plain_loop,
    terms_alone,
    train_through_trouble,
    train_with_masked_mean,
    train_with_terms,
    with_plans_changed,
)
from tests.runtime.loop.memory_runs import Model
from tests.runtime.loop.runs import EXACT, Packs, assert_exact, in_double, prepared, step_on_ranks, train
from tests.runtime.loop.test_families import CASES, FEW, gpt2
from tests.runtime.train.runs import local_world

RECOMPUTE = (True, False, True)
PACKS = ((2, 3), (6,), (0, 8, 4), (1,), (5, 7), (9,))
"""Of 22, 2, 24, 5, 39 and 17 tokens; sequences 2, 0, 5 and 9 have 21, 13, 30 and 17."""
SIZES = ((5, 9, 1, 7), (), (13, 3, 8), (2, 3), (29, 2, 8), (4, 4, 4, 5))
"""Slices within a sequence, of several, across boundaries, of one token; and packs that are not cut."""
ONE = (Packs(ranks=(0,), packs=PACKS, recompute=RECOMPUTE, slice_sizes=SIZES),)
TWO = (Packs(ranks=(0, 1), packs=PACKS, stage_layers=(1, 2), recompute=RECOMPUTE, slice_sizes=SIZES),)
THREE = (
    Packs(
        ranks=(0, 1, 2),
        packs=PACKS,
        stage_layers=(1, 1, 1),
        recompute=(True,) * 3,
        slice_sizes=SIZES,
        keeps_attention=True,
    ),
)
FOUR = (
    # Stages of two ranks; then two ranks in one stage beside two stages, of which some packs are cut.
    Packs(
        ranks=(0, 1, 2, 3), packs=((2, 3), (6,), (0, 8)), stage_layers=(2, 1), recompute=RECOMPUTE,
        slice_sizes=((5, 9, 2, 6), (), (12, 4)),
    ),
    Packs(ranks=(3, 1), packs=((4,), (1,)), phase=1, slice_sizes=((3, 5),)),
    Packs(ranks=(2, 0), packs=((5, 7), (9,)), stage_layers=(1, 2), phase=1, slice_sizes=((), (6, 6, 5))),
)  # fmt: skip
SPLIT_HEADS = (
    Packs(
        ranks=(0, 1, 2),
        packs=((2, 3), (0, 8, 4), (5, 7), (9,), (1,), (6,)),
        recompute=RECOMPUTE,
        slice_sizes=((5, 9, 3, 5), (13, 3, 8), (29, 4, 6)),
    ),
)


GROUPS = {"one": ONE, "two stages": TWO, "three stages": THREE, "mixed": FOUR, "three ranks": SPLIT_HEADS}
QUICK = {
    ("llama", "one"),
    ("llama", "mixed"),
}
COMPARED = {("llama", "one")}
"""That of which slices are compared before the step too. Other families and groups are in deep runs."""


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=[] if (name, which) in QUICK else [pytest.mark.deep])
        for name in ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox")
        for which in GROUPS
    ],
)
def test_a_family_in_slices_trains_as_its_own_loop_does(ranks, name, which):
    size = 1 + max(rank for group in GROUPS[which] for rank in group.ranks)
    compared = (name, which) not in QUICK - COMPARED
    for found in ranks(size).run(step_on_ranks, CASES[name], GROUPS[which], compares_stages=compared):
        assert_exact(CASES[name], found, name)


@pytest.mark.parametrize(
    ("groups", "num_ranks"), [(TWO, 2), pytest.param(SPLIT_HEADS, 3, marks=pytest.mark.deep)], ids=["stages", "heads"]
)
def test_dropout_drops_the_same_in_slices_as_in_whole_micro_batches(ranks, groups, num_ranks):
    case = replace(CASES["gpt2"], build=partial(gpt2, 0.2))
    ((loss,), changes) = ranks(1).run(step_on_ranks, case, (FEW,))[0]
    for (sliced_loss,), sliced in ranks(num_ranks).run(step_on_ranks, case, groups, compares_stages=False):
        assert sliced_loss == pytest.approx(loss, abs=EXACT)
        for name, change in changes.items():
            torch.testing.assert_close(sliced[name], change, rtol=0, atol=EXACT)


@pytest.mark.deep  # by default: slices above, stages that gather weights in tests/session/test_planned_stages.py
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stages_whose_weights_are_gathered_for_a_step_compute_in_slices_too(ranks, name):
    for found in ranks(2).run(step_on_ranks, CASES[name], TWO, by_layer=True, compares_stages=False):
        assert_exact(CASES[name], found, name)


def pushes_early(case, groups):
    """Whether gradients go to their owners within the last backward of the step, and none comes after."""
    with in_double():
        run = prepared(case, groups, local_world())
        train(run)
        is_on = run.overlap._is_on
        run.close()
    return is_on


def test_gradients_are_pushed_in_the_backward_of_the_first_slice_which_is_the_last(ranks):
    assert all(ranks(2).run(pushes_early, CASES["llama"], TWO))


def in_slices(plan):
    """The plan, where micro-batches of more than 14 tokens have four slices and others three, of one token and more."""
    pipelines = []
    for pipeline in plan.pipelines:
        micro_batches = []
        for planned in pipeline.micro_batches:
            tokens, degree = planned.pack.num_tokens, pipeline.scheme.degree
            sizes = (tokens // 2, degree, *[3] * (tokens > 14))
            sizes = (*sizes, tokens - sum(sizes))
            micro_batches.append(replace(planned, slices=tuple(PlannedSlice(size, 1.0 * size) for size in sizes)))
        pipelines.append(replace(pipeline, micro_batches=tuple(micro_batches)))
    return replace(plan, pipelines=tuple(pipelines))


def slicing_all(function, *arguments, **options):
    """``function`` where every plan cuts all micro-batches into slices."""
    return with_plans_changed(in_slices, function, *arguments, **options)


@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(trained, marks=[pytest.mark.deep] * (trained != "the upper layers"))
        for trained in memory_runs.TRAINED
    ],
)
def test_a_model_of_which_only_parts_are_trained_computes_in_slices(ranks, trained):
    expected = memory_runs.train_alone(ranks, trained)
    for losses, _, weights in ranks(2).run(slicing_all, memory_runs.train, 1, 1, {}, trained, stages=2):
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


SHAPES = [(2, 1, 2), *(pytest.param(*shape, marks=pytest.mark.deep) for shape in ((1, 1, 1), (2, 2, 1), (4, 2, 2)))]
"""Ranks, degree and stages."""


@pytest.mark.deep
@memory_runs.at_few_places_and_in_deep_runs_at_all
@pytest.mark.parametrize(("num_ranks", "degree", "stages"), SHAPES)
def test_slices_that_run_out_of_memory_keep_no_other_rank_waiting(ranks, num_ranks, degree, stages, places):
    memory_runs.check_recovery(ranks, num_ranks, slicing_all, memory_runs.train, degree, stages=stages, places=places)


@pytest.mark.parametrize(
    "place",
    [
        "in the backward",
        *(
            pytest.param(p, marks=pytest.mark.deep)
            for p in ("the loss", "before the forward", "before the backward", "after the backward")
        ),
    ],
)
@pytest.mark.parametrize(("num_ranks", "degree", "stages"), SHAPES)
def test_a_rank_that_leaves_a_step_of_slices_keeps_no_other_waiting(ranks, num_ranks, degree, stages, place):
    losses, expected = plain_loop()
    for troubled in {num_ranks // 2} if place == "in the backward" else {0, num_ranks - 1}:
        for found, weights, _ in ranks(num_ranks).run(
            slicing_all, train_through_trouble, degree, 1, place, {troubled}, stages=stages
        ):
            assert found == pytest.approx(losses, abs=1e-10)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_slices_without_targets_pass_gradients_of_keys_and_values_on(ranks, degree):
    loss, weights = masked_mean_alone()
    for found_loss, found, num_without in ranks(degree).run(slicing_all, train_with_masked_mean, degree, 1):
        assert num_without and found_loss == pytest.approx(loss, abs=EXACT)
        torch.testing.assert_close(found, weights, rtol=0, atol=EXACT)


MEANS = (("side", False), ("step", True))
"""Those of runs that are not deep: of all tokens, and of targets."""


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("how", "labelled"),
    [
        pytest.param(how, labelled, marks=[pytest.mark.deep] * ((how, labelled) not in MEANS))
        for how in ("side", "declared", "tokens", "step") for labelled in (False, True)
    ],
)  # fmt: skip
def test_means_over_tokens_and_sequences_are_those_of_whole_micro_batches(ranks, how, labelled):
    loss, weights = terms_alone(labelled)
    for found_loss, found in ranks(2).run(slicing_all, train_with_terms, 2, how, labelled):
        assert found_loss == pytest.approx(loss, abs=EXACT)
        torch.testing.assert_close(found, weights, rtol=0, atol=EXACT)


class Neighbours(Model):
    """Adds to each token of a layer's input what was there before it: slices do not know what slices before had."""

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x + torch.cat([x[:, :1], x[:, :-1]], dim=1))
        logits = x @ self.tokens.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def test_a_model_in_which_tokens_meet_outside_of_attention_is_not_cut_into_slices():
    run = make_run(Neighbours().double(), degree=1)
    check_stages(run, (1, 1, 1))
    with pytest.raises(CheckError, match=r"in stages of \[1, 1, 1\] layers whose micro-batches .*slices=none"):
        check_stages(run, (1, 1, 1), slices=True)
    run.close()


def test_what_no_micro_batch_of_can_be_cut_is_told():
    run = make_run(model_of(), degree=1)
    assert not slice_problem(run) and slice_problem(run, is_coupled=True).startswith("coupled_loss=")
    check_stages(run, (3,), slices=True)
    collator = run.collator
    for changes, said in (({"slot_tokens": 2}, "its slots are"), ({"units": object()}, "its items are units")):
        run.collator = replace(collator, **changes)
        assert slice_problem(run).startswith(said)
    run.collator = collator
    run.wrapped_model.objective = EVERY_TOKEN
    assert slice_problem(run).startswith("it does not predict next tokens")
    run.wrapped_model.objective = NEXT_TOKEN
    run.frozen_models.append(run.wrapped_model)
    assert slice_problem(run) == "frozen models compute beside it"
    run.frozen_models.clear()
    run.close()


def refused_in_one_stage():
    run = make_run(model_of(), degree=1, by_layer=True)
    planner = run.planner
    run.planner = lambda batch: in_slices(planner(batch))
    with pytest.raises(InputError) as refusal:
        next(run.steps())
    run.close()
    return str(refusal.value)


def test_slices_in_one_stage_are_refused_where_each_layer_is_gathered_for_one_forward(ranks):
    for said in ranks(2).run(refused_in_one_stage):
        assert "cuts micro-batches into slices in one stage, and weights are gathered layer by layer" in said


def test_a_plan_for_forwards_alone_has_the_same_packs_in_one_piece():
    batch = GlobalBatch(step=0, ids=(0, 1, 2, 3), lengths=memory_runs.LENGTHS)
    plan = memory_runs.plan_on(2, 1, 0, stages=2)(batch)
    assert in_one_piece(in_slices(plan)) == plan and in_one_piece(plan) == plan
