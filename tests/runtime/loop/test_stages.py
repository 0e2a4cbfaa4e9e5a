"""Pipelines of any model train as its own loop does, beside pipelines of other depths, and no rank hangs."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.errors import CheckError, InfeasibleError, InputError
from lengthwise.runtime.loop import staged_pipeline
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.wrap.stage_pass import StagedForward
from tests.runtime.loop import memory_runs
from tests.runtime.loop.loops import make_run, model_of, plain_loop, train_through_trouble, weights_of
from tests.runtime.loop.memory_runs import Model
from tests.runtime.loop.runs import EXACT, Packs, assert_exact, step_on_ranks
from tests.runtime.loop.test_families import CASES, FEW, gpt2

RECOMPUTE = (True, False, True)
TWO = (
    Packs(
        ranks=(0, 1), packs=((2, 3), (6,), (0, 8), (4, 1), (5,), (7,), (9,)), stage_layers=(1, 2), recompute=RECOMPUTE
    ),
)
THREE = (
    Packs(
        ranks=(0, 1, 2),
        packs=((2, 3), (6,), (0, 8, 4), (1,), (5, 7), (9,)),
        stage_layers=(1, 1, 1),
        recompute=RECOMPUTE,
    ),
)
FOUR = (
    # A pipeline of degree 2 and two stages; then three stages beside one rank; then degree 2 beside two stages.
    Packs(ranks=(0, 1, 2, 3), packs=((2, 3), (6,), (0, 8)), stage_layers=(2, 1), recompute=RECOMPUTE),
    Packs(ranks=(3, 1, 0), packs=((4,), (1,)), stage_layers=(1, 1, 1), phase=1),
    Packs(ranks=(2,), packs=((5,),), recompute=RECOMPUTE, phase=1),
    Packs(ranks=(0, 1), packs=((7,),), phase=2),
    Packs(ranks=(3, 2), packs=((9,),), stage_layers=(1, 2), phase=2),
)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("llama", THREE), *(pytest.param(*case, marks=pytest.mark.deep) for case in (("gpt2", TWO), ("llama", FOUR)))],
)
def test_a_family_in_stages_trains_as_its_own_loop_does(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], groups):
        assert_exact(CASES[name], found, name)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("groups", [TWO, THREE, FOUR])
def test_every_family_in_stages_trains_as_its_own_loop_does(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], groups):
        assert_exact(CASES[name], found, name)


def test_dropout_drops_the_same_in_stages_as_in_one(ranks):
    case = replace(CASES["gpt2"], build=partial(gpt2, 0.2))
    ((loss,), changes) = ranks(1).run(step_on_ranks, case, (FEW,))[0]
    for (staged_loss,), staged in ranks(3).run(step_on_ranks, case, THREE, compares_stages=False):
        assert staged_loss == pytest.approx(loss, abs=EXACT)
        for name, change in changes.items():
            torch.testing.assert_close(staged[name], change, rtol=0, atol=EXACT)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "groups"),
    [("gpt2", TWO), *(pytest.param("llama", groups, marks=pytest.mark.deep) for groups in (THREE, FOUR))],
)
def test_stages_whose_weights_are_gathered_for_a_step_train_as_with_whole_ones(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], groups, by_layer=True):
        assert_exact(CASES[name], found, name)


QUICK_PARTS = {
    ("behind the attention", True), ("the first attention", False), ("no layer", False),
}  # fmt: skip


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("trained", "by_layer"),
    [
        pytest.param(trained, by_layer, marks=[pytest.mark.deep] * ((trained, by_layer) not in QUICK_PARTS))
        for trained in memory_runs.TRAINED for by_layer in (False, True)
    ],
)  # fmt: skip
def test_a_model_of_which_only_parts_are_trained_computes_in_stages(ranks, trained, by_layer):
    expected = memory_runs.train_alone(ranks, trained)
    for losses, _, weights in ranks(3).run(memory_runs.train, 1, 1, {}, trained, stages=3, by_layer=by_layer):
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("num_ranks", "degree", "stages", "by_layer"),
    [
        (2, 1, 2, True),
        *(
            pytest.param(*p, marks=pytest.mark.deep)
            for p in ((2, 1, 2, False), (4, 2, 2, False), (3, 1, 3, False), (4, 2, 2, True))
        ),
    ],
)
@memory_runs.at_few_places_and_in_deep_runs_at_all
def test_a_stage_that_runs_out_of_memory_keeps_no_other_waiting(ranks, num_ranks, degree, stages, by_layer, places):
    options = {"stages": stages, "by_layer": by_layer, "places": places}
    memory_runs.check_recovery(ranks, num_ranks, memory_runs.train, degree, **options)


SHAPES = ((3, 1, 3, False), (2, 1, 2, True), (2, 1, 2, False), (4, 2, 2, False), (4, 2, 2, True))
LEFT = ("before the forward", "before the backward", "the loss", "in the backward", "after the backward")
QUICK = {SHAPES[1]: ("in the backward",)}


@pytest.mark.parametrize(
    ("num_ranks", "degree", "stages", "by_layer", "place"),
    [
        pytest.param(*shape, place, marks=[pytest.mark.deep] * (place not in QUICK.get(shape, ())))
        for shape in SHAPES for place in LEFT
    ],
)  # fmt: skip
def test_a_stage_that_leaves_a_step_keeps_no_other_waiting(ranks, num_ranks, degree, stages, place, by_layer):
    losses, expected = plain_loop()
    for troubled in {num_ranks // 2} if place == "in the backward" else (0, num_ranks - 1):
        for found, weights, _ in ranks(num_ranks).run(
            train_through_trouble, degree, 1, place, {troubled}, stages=stages, by_layer=by_layer
        ):
            assert found == pytest.approx(losses, abs=1e-10)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


class Skipping(Model):
    """Adds the output of its first layer to that of its last."""

    def forward(self, idx, targets):
        x = first = self.layers[0](self.tokens(idx) + self.places(torch.arange(idx.shape[1])))
        for layer in self.layers[1:]:
            x = layer(x)
        logits = (x + first) @ self.tokens.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def test_a_model_in_whose_stages_more_than_hidden_states_passes_is_refused():
    run = make_run(Skipping().double(), degree=1)
    for splits in (False, True):
        with pytest.raises(CheckError, match=r"Skipping learns .* of \[2, 1\] layers than in one.* with one stage"):
            check_stages(run, (2, 1), splits=splits)
    run.close()


def test_a_check_of_stages_leaves_no_gradient_behind():
    run = make_run(model_of(), degree=1)
    before = weights_of(run.model)
    check_stages(run, (1, 1, 1))
    assert not run.state.gradients.any()
    assert torch.equal(weights_of(run.model), before)
    run.close()


def check_stages_where_a_rank_fails():
    """What each rank hears where the last one fails in a stage, and whether the stages are exact afterwards."""
    run = make_run(model_of(), degree=1, by_layer=True)

    def fail(*_):
        raise MemoryError("out of memory")

    hook = run.model.layers[1].register_forward_pre_hook(fail) if run.world.rank == run.world.size - 1 else None
    with pytest.raises((CheckError, InfeasibleError)) as refused:
        check_stages(run, (1, 2))
    if hook is not None:
        hook.remove()
    check_stages(run, (1, 2))
    run.close()
    return str(refused.value)


def test_a_rank_that_fails_in_a_check_of_gathered_stages_keeps_no_other_waiting(ranks):
    first, second = ranks(2).run(check_stages_where_a_rank_fails)
    assert first == second


def test_a_model_called_twice_or_beside_frozen_ones_is_refused_in_stages():
    stage = StagedForward(layers=range(1), num_layers=2, receive=torch.zeros_like)
    stage.begin(torch.nn.Identity(), {})
    with pytest.raises(InputError, match="called twice in a micro-batch of a pipeline with several stages"):
        stage.begin(torch.nn.Identity(), {})
    run = make_run(model_of(), degree=1)
    assert not run.stage_problem
    run.frozen_models.append(run.wrapped_model)
    assert run.stage_problem == "frozen models compute beside it"
    run.frozen_models.clear()
    run.close()


def test_what_a_loop_changes_in_place_before_a_backward_is_told_as_that():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.mul_(2.0)
    stage = SimpleNamespace(is_last=True, differentiate=loss.backward)
    with pytest.raises(CheckError, match="changed in place what the backward of an earlier micro-batch needs"):
        staged_pipeline._differentiate(stage, None)
