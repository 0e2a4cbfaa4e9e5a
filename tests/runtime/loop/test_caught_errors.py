"""A loop that catches an error, leaves a step or skips it: no rank hangs, nothing is lost, nothing is counted twice."""

import pytest
import torch

from lengthwise.core.errors import CheckError, LengthwiseError
from tests.runtime.loop.loops import TroubleError, make_run, model_of, plain_loop, train_through_trouble, weights_of

PLACES = ("before the forward", "before the backward", "the loss", "after the backward")


@pytest.fixture(scope="module")
def expected():
    return plain_loop()


def assert_as_expected(found, expected):
    losses, weights = found
    assert losses == pytest.approx(expected[0], abs=1e-10)
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[pytest.mark.deep] * (place in (PLACES[0], PLACES[3]))) for place in PLACES]
)
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [(2, 2, 1), *(pytest.param(*sizes, marks=pytest.mark.deep) for sizes in ((1, 1, 0), (3, 3, 2)))],
)
def test_a_step_whose_error_one_rank_caught_comes_again_and_trains_what_one_device_trains(
    ranks, expected, num_ranks, degree, recomputed, place
):
    for rank, (losses, weights, said) in enumerate(
        ranks(num_ranks).run(train_through_trouble, degree, recomputed, place, {num_ranks - 1})
    ):
        assert_as_expected((losses, weights), expected)
        if place == "the loss":
            assert "step 1: loss nan" in said[0]
        elif rank < num_ranks - 1:
            assert said[0].startswith(f"step 1: rank {num_ranks - 1}: left it after ")
        else:
            assert not said


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[pytest.mark.deep] * (place in (PLACES[0], PLACES[3]))) for place in PLACES]
)
def test_an_error_that_all_ranks_catch_leaves_nothing_of_its_step_behind(ranks, expected, place):
    for losses, weights, _ in ranks(2).run(train_through_trouble, 1, 0, place, {0, 1}):
        assert_as_expected((losses, weights), expected)


def test_a_rank_that_forgets_its_update_is_named_and_all_begin_the_step_again(ranks):
    ranks(2).run(check_update_on_one_rank)


def check_update_on_one_rank():
    run = make_run(model_of(), degree=1)
    steps = run.steps()
    step = next(steps)
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
    if run.world.is_first:
        with pytest.raises(CheckError, match=r"step 0: rank 1: left it without step.update\(\)"):
            step.update()
    step = next(steps)
    assert (step.number, step.attempt) == (0, 1), "on both ranks"
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
    with pytest.raises(CheckError, match=r"step 0 got no step.update\(\); step.skip\(\) leaves it out"):
        next(steps)
    run.close()


def test_a_step_that_fails_again_and_again_ends_the_loop_with_the_reason(ranks):
    ranks(2).run(check_endless)


def check_endless():
    run, attempts = make_run(model_of(), degree=1), 0
    with pytest.raises(CheckError, match=r"step 0 was given up 11 times.*loss nan.*step.skip\(\)"):
        for step in run.steps():
            attempts += 1
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs)[1] * float("nan"))
            with pytest.raises(LengthwiseError):
                step.update()
    assert attempts == 11
    run.close()


@pytest.mark.parametrize("when", ["after its update raised", "in its midst"])
def test_a_step_may_be_skipped_and_is_accounted_for(ranks, when, tmp_path):
    expected = plain_loop(num_steps=2)
    for losses, weights, skipped, number in ranks(2).run(skip_the_second, when, tmp_path):
        assert_as_expected((losses, weights), expected)
        assert skipped == [1] and number == 3


def skip_the_second(when, folder):
    model = model_of()
    run, losses = make_run(model, degree=2), []
    for step in run.steps():
        for micro_batch in step:
            loss = model(**micro_batch.inputs)[1]
            if step.number == 1 and when == "in its midst":
                break
            step.backward(loss * (float("nan") if step.number == 1 else 1.0))
        if step.number != 1:
            losses.append(step.update().loss)
            continue
        if when == "after its update raised":
            with pytest.raises(LengthwiseError):
                step.update()
        step.skip()
        with pytest.raises(CheckError, match="was skipped"):
            step.skip()
    run.save(folder)
    resumed = make_run(model_of(), degree=2)
    number = resumed.resume(folder)
    assert resumed.skipped == run.skipped
    assert resumed.ledger == run.ledger and (run.ledger.updates, run.ledger.skipped_steps) == (2, 1)
    assert run.ledger.sequences and run.ledger.skipped_sequences
    run.close()
    return losses, weights_of(model), run.skipped, number


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_a_checkpoint_saved_where_an_error_was_caught_has_the_step_that_it_left(ranks, degree, tmp_path):
    expected = plain_loop()
    for found in ranks(2).run(save_where_an_error_was_caught, degree, tmp_path):
        assert_as_expected(found, expected)


def save_where_an_error_was_caught(degree, folder):
    model, losses = model_of(), []
    run = make_run(model, degree=degree)
    try:
        for step in run.steps():
            for micro_batch in step:
                loss = model(**micro_batch.inputs)[1]
                if step.number == 1:
                    raise TroubleError
                step.backward(loss)
            losses.append(step.update().loss)
    except TroubleError:
        run.save(folder)
    run.close()
    model = model_of()
    run = make_run(model, degree=degree)
    run.stream.step = 17  # the checkpoint says better
    assert run.resume(folder) == 1
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
    run.close()
    return losses, weights_of(model)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("call", ["save", "resume", "skip"])
def test_what_one_rank_calls_alone_is_named_at_once(ranks, call, tmp_path):
    ranks(2).run(check_called_alone, call, tmp_path)


def check_called_alone(call, folder):
    run = make_run(model_of(), degree=1)
    run.save(folder)
    steps = run.steps()
    for _ in range(2):
        step = next(steps)
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        if step.number == 0:
            step.update()
    calls = {
        "save": (lambda: run.save(folder), r"rank 0 called step.update\(\) of step 1, rank 1 called run.save\(\)"),
        "resume": (lambda: run.resume(folder), r"rank 1 called run.resume\(\)"),
        "skip": (step.skip, r"rank 0 called step.update\(\) of step 1, rank 1 called step.skip\(\) of step 1"),
    }
    call, message = calls[call]
    if run.world.is_first:
        with pytest.raises(CheckError, match=message):
            step.update()
    else:
        if call != step.skip:
            step._shards.clear()  # as if this rank were between two steps
            step._own, step._iterator = [], None
            step.is_over = True
        with pytest.raises(CheckError, match=message):
            call()
    assert step.is_over, "on every rank, so that none waits in run.close()"
    run.close()


def test_a_checkpoint_in_the_midst_of_a_step_is_refused(tmp_path):
    run = make_run(model_of(), degree=1)
    step = next(run.steps())
    for micro_batch in step:
        with pytest.raises(CheckError, match=r"run.save\(\) in the midst of step 0"):
            run.save(tmp_path)
        step.backward(run.model(**micro_batch.inputs)[1])
    with pytest.raises(CheckError, match=r"run.save\(\) in the midst of step 0"):
        run.save(tmp_path)
    step.update()
    assert run.save(tmp_path).name == "step_00000001"
    run.close()
