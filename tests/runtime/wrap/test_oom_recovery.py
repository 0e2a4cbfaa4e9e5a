"""A rank that runs out of memory takes the others out of the step with it: nobody hangs, nothing is lost or counted
twice."""

import pytest
import torch

from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.oom_recovery import OutputStructure
from tests.runtime.loop.memory_runs import TRAINED, at_few_places_and_in_deep_runs_at_all, train, train_alone


@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [
        (2, 2, 2),
        *(pytest.param(*s, marks=pytest.mark.deep) for s in ((2, 2, 0), (3, 3, 0), (3, 3, 2), (4, 2, 0), (4, 2, 2))),
    ],
)
@at_few_places_and_in_deep_runs_at_all
def test_a_step_that_did_not_fit_anywhere_comes_again_and_ends_at_the_same_weights(
    ranks, num_ranks, degree, recomputed, places
):
    expected = train_alone(ranks)
    for place in places:
        found = ranks(num_ranks).run(train, degree, recomputed, {1: (place,)})
        for losses, told, weights in found:
            assert told == ["rank 1 in micro-batch 0"]
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.deep  # by default: whole models below, a teacher in test_loss_backward
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [(2, 2, 2), *(pytest.param(*sizes, marks=pytest.mark.deep) for sizes in ((2, 2, 0), (3, 3, 0), (3, 3, 3)))],
)
@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(name, marks=[pytest.mark.deep] * (name != "behind the attention"))
        for name in TRAINED
        if name != "all"
    ],
)
@at_few_places_and_in_deep_runs_at_all
def test_a_rank_of_a_model_with_frozen_parts_stands_in_for_what_its_backward_really_sends(
    ranks, trained, num_ranks, degree, recomputed, places
):
    expected = train_alone(ranks, trained)
    for place in places:
        for losses, told, weights in ranks(num_ranks).run(train, degree, recomputed, {1: (place,)}, trained):
            assert told in (["rank 1 in micro-batch 0"], []), "a backward that has no such place does not fail there"
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


def test_several_ranks_may_fail_at_different_places(ranks):
    expected = train_alone(ranks)
    for losses, told, weights in ranks(4).run(train, 2, 1, {0: ("backward of layer 2",), 3: ("forward of layer 1",)}):
        assert told == ["rank 0 in micro-batch 0", "rank 3 in micro-batch 0"]
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


def test_what_was_not_computed_has_the_shapes_that_it_would_have():
    outputs = OutputStructure()
    outputs.note({"logits": torch.ones(1, 4, 4), "parts": (torch.ones(4), torch.ones(()), 7)}, 4)
    outputs.note({"logits": torch.ones(1, 6, 4), "parts": (torch.ones(6), torch.ones(()), 7)}, 6)
    found = outputs.not_computed(9, torch.device("cpu"))
    logits, (by_slot, loss, number) = found["logits"], found["parts"]
    assert logits.shape == (1, 9, 4) and by_slot.shape == (9,) and loss.shape == () and number == 7
    value = torch.nn.functional.cross_entropy(logits.view(-1, 4)[..., :-1], torch.zeros(9).long()) + 2 * loss**2 / 3
    assert isinstance(value, MissingTensor) and f"{value:.3f}" == "nan"


def test_only_a_lack_of_memory_is_taken_for_one():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
