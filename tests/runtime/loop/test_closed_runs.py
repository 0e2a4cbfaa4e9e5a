"""A run that is closed before its end leaves nobody waiting, and nothing in the next run of its processes."""

import re
from contextlib import ExitStack

import pytest
import torch

from lengthwise.core.errors import CheckError
from tests.runtime.loop.loops import TroubleError, make_run, model_of, plain_loop, weights_of

PLACES = ("before the forward", "before the backward", "after the backward", "before the update", "between two steps")


def go_until(place, run, *, is_failing=True):
    """A user's loop that fails in its second step, or before that, and closes the run."""
    try:
        for step in run.steps():
            fails = is_failing and step.number == 1
            if fails and place == "between two steps":
                raise TroubleError("a bug")
            for micro_batch in step:
                if fails and place == "before the forward":
                    raise TroubleError("a bug")
                loss = run.model(**micro_batch.inputs)[1]
                if fails and place == "before the backward":
                    raise TroubleError("a bug")
                step.backward(loss)
                if fails and place == "after the backward":
                    raise TroubleError("a bug")
            if fails and place == "before the update":
                raise TroubleError("a bug")
            step.update()
    finally:
        run.close()


@pytest.mark.parametrize(
    "place",
    # What all ranks hear of an error there is looked at below.
    [pytest.param(p, marks=[pytest.mark.deep] * (p != "after the backward")) for p in PLACES],
)
@pytest.mark.parametrize("by_layer", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_the_next_run_after_an_error_that_all_ranks_caught_trains_what_one_device_trains(ranks, place, by_layer):
    first, second = plain_loop(num_steps=1), plain_loop()
    for weights, losses, after in ranks(2).run(train_again, place, by_layer):
        torch.testing.assert_close(weights, first[1], rtol=0, atol=1e-10)
        assert losses == pytest.approx(second[0], abs=1e-10)
        torch.testing.assert_close(after, second[1], rtol=0, atol=1e-10)


def train_again(place, by_layer):
    failed = model_of()
    with pytest.raises(TroubleError):
        go_until(place, make_run(failed, degree=1, by_layer=by_layer))
    model, losses = model_of(), []
    run = make_run(model, degree=2, by_layer=by_layer)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
    run.close()
    return weights_of(failed), losses, weights_of(model)


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[pytest.mark.deep] * (place in PLACES[1:3])) for place in PLACES]
)
@pytest.mark.parametrize("by_layer", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_ranks_hear_at_once_which_one_closed_the_run_where_and_why(ranks, place, by_layer):
    heard = ranks(2).run(close_on_first, place, by_layer)[1]
    where = (
        "without step.update()" if place == "before the update" else r"after \d of its \d micro-batches, by an error"
    )
    assert re.match(
        rf"step 1: rank 0 closed the run {where}.* \(TroubleError: a bug\), and no other rank can go", heard
    )


def close_on_first(place, by_layer):
    run = make_run(model_of(), degree=2, by_layer=by_layer)
    if run.world.is_first:
        with pytest.raises(TroubleError):
            go_until(place, run)
        return ""
    with pytest.raises(CheckError) as error:
        go_until(place, run, is_failing=False)
    with pytest.raises(CheckError, match="rank 0 closed the run"):
        next(run.steps())
    return str(error.value)


@pytest.mark.parametrize("call", ["run.steps()", "run.plain()", "run.frozen(model)"])
def test_a_rank_that_closes_the_run_by_an_error_after_an_update_is_named(ranks, call):
    heard = ranks(2).run(close_after_update, call)[1]
    assert heard.startswith("step 1: rank 0 closed the run between two steps (TroubleError: a bug)")


def close_after_update(call):
    run = make_run(model_of(), degree=1, by_layer=call == "run.plain()")
    steps = run.steps()
    step = next(steps)
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
    step.update()
    if not run.world.is_first:
        with pytest.raises(CheckError) as error, ExitStack() as stack:
            if call == "run.plain()":
                stack.enter_context(run.plain())
            elif call == "run.frozen(model)":
                run.frozen(model_of())
            else:
                next(steps)
        run.close()
        return str(error.value)
    try:
        raise TroubleError("a bug")
    except TroubleError:
        run.close()
    return ""
