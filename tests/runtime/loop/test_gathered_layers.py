"""Weights that are gathered layer by layer train as the model's own loop does, and no rank hangs or holds more."""

import pytest
import torch

from tests.runtime.loop import memory_runs
from tests.runtime.loop.loops import plain_loop, train_through_trouble
from tests.runtime.loop.runs import assert_exact, step_on_ranks
from tests.runtime.loop.test_families import CASES, DEGREES


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "num_kept"),
    [("llama", 1), *(pytest.param(*case, marks=pytest.mark.deep) for case in (("gpt2", 3), ("bert", 0)))],
)
def test_a_family_whose_weights_are_gathered_by_layer_is_exact_at_degrees_1_to_4(ranks, name, num_kept):
    for found in ranks(4).run(step_on_ranks, CASES[name], DEGREES, by_layer=True, num_kept=num_kept):
        assert_exact(CASES[name], found, name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.deep) for name in CASES])
def test_every_family_is_exact_however_many_layers_stay_whole(ranks, name):
    for num_kept in range(4):
        for found in ranks(4).run(step_on_ranks, CASES[name], DEGREES, by_layer=True, num_kept=num_kept):
            assert_exact(CASES[name], found, name)


@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [(2, 1, 0), *(pytest.param(*p, marks=pytest.mark.deep) for p in ((4, 2, 1), (2, 2, 2)))],
)
@memory_runs.at_few_places_and_in_deep_runs_at_all
def test_a_rank_that_runs_out_of_memory_goes_on_gathering_for_the_others(ranks, num_ranks, degree, recomputed, places):
    expected = memory_runs.train_alone(ranks)
    for place in places:
        for losses, told, weights in ranks(num_ranks).run(
            memory_runs.train, degree, recomputed, {1: (place,)}, by_layer=True
        ):
            assert told == ["rank 1 in micro-batch 0"]
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "trained",
    # Stages gather the others for a step.
    [pytest.param(name, marks=[pytest.mark.deep] * (name != "an output bias")) for name in memory_runs.TRAINED],
)
def test_a_model_of_which_only_parts_are_trained_gathers_those(ranks, trained):
    expected = memory_runs.train_alone(ranks, trained)
    for recomputed in (0, 3):
        for losses, _, weights in ranks(3).run(memory_runs.train, 1, recomputed, {}, trained, by_layer=True):
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "place",
    [
        "before the forward",
        *(pytest.param(p, marks=pytest.mark.deep) for p in ("before the backward", "the loss", "after the backward")),
    ],
)
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [
        (3, 1, 2),
        *(pytest.param(2, degree, recomputed, marks=pytest.mark.deep) for degree, recomputed in ((1, 0), (2, 1))),
    ],
)
def test_a_rank_that_leaves_a_step_goes_on_gathering_for_the_others(ranks, num_ranks, degree, recomputed, place):
    losses, expected = plain_loop()
    for found, weights, _ in ranks(num_ranks).run(
        train_through_trouble, degree, recomputed, place, {num_ranks - 1}, by_layer=True
    ):
        assert found == pytest.approx(losses, abs=1e-10)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
