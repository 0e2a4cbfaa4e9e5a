"""What loops of torch do beside a step: clip, step, clear and read gradients. It is right, or it is an error."""

import copy
import gc

import pytest
import torch
from torch import nn

from lengthwise.core.errors import CheckError, InputError
from tests.runtime.loop.loops import STEPS, make_run, model_of, plain_loop, weights_of

MODES = [
    pytest.param(torch.float64, 2, {}, id="whole", marks=pytest.mark.deep),
    pytest.param(torch.float64, 2, {"by_layer": True}, id="by layer", marks=pytest.mark.deep),
    pytest.param(torch.float64, 2, {"stages": 2}, id="stages", marks=pytest.mark.deep),
    pytest.param(torch.bfloat16, 2, {}, id="whole, bfloat16"),
    pytest.param(torch.bfloat16, 2, {"by_layer": True}, id="by layer, bfloat16", marks=pytest.mark.deep),
    pytest.param(torch.bfloat16, 1, {}, id="one rank, bfloat16", marks=pytest.mark.deep),
]  # fmt: skip


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_values(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-6)


def step_of_sgd(model):
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def set_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)


REFUSED = (clip, clip_values, step_of_sgd, set_gradients)


def compute(run, step, change=None):
    """Compute the micro-batches of a step; ``change``: what the loop does after each backward."""
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
        if change is not None:
            change(run.model)


def train_with(dtype, options, change):
    """Weights after steps of a loop that makes ``change`` before and after each."""
    run = make_run(model_of(dtype), degree=1, num_steps=len(REFUSED), **options)
    for step in run.steps():
        change(run.model)
        compute(run, step)
        step.update()
        change(run.model)
    with run.plain():
        found = weights_of(run.model)
    run.close()
    return found


def train_past_refusals(dtype, options):
    """The same where each change is tried after backwards, and then before the update."""
    model = model_of(dtype)
    run = make_run(model, degree=1, num_steps=len(REFUSED), **options)
    steps = run.steps()
    for number, change in enumerate(REFUSED):
        with pytest.raises((InputError, CheckError), match=r"step.update\(\)|left it after 1"):
            step = next(steps)
            compute(run, step, change)
            step.update()
        step = next(steps)
        assert (step.number, step.attempt) == (number, 1)
        compute(run, step)
        try:
            change(model)
        except InputError:
            step.update()  # nothing was changed
            continue
        with pytest.raises(CheckError, match=r"step.update\(\)"):
            step.update()
        step = next(steps)
        compute(run, step)
        step.update()
    with run.plain() as plain:
        step_of_sgd(plain)  # without a gradient; weights may be changed in it
        found = weights_of(model)
    run.close()
    step_of_sgd(model)
    return found


@pytest.fixture(scope="module")
def undisturbed(ranks):
    """Weights after steps of a loop that changes nothing, trained once in each mode."""
    trained = {}

    def train(dtype, num_ranks, options):
        mode = (dtype, num_ranks, *options.items())
        if mode not in trained:
            trained[mode] = ranks(num_ranks).run(train_with, dtype, options, nothing)[0]
        return trained[mode]

    return train


@pytest.mark.parametrize(("dtype", "num_ranks", "options"), MODES)
def test_clipping_and_optimizers_of_the_loop_are_refused_and_leave_nothing(
    ranks, undisturbed, dtype, num_ranks, options
):
    expected = undisturbed(dtype, num_ranks, options)
    for found in ranks(num_ranks).run(train_past_refusals, dtype, options):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if dtype == torch.float64:
        torch.testing.assert_close(expected, plain_loop(num_steps=len(REFUSED))[1], rtol=0, atol=1e-10)


def nothing(model):
    pass


def clear(model):
    model.zero_grad()


def clear_in_place(model):
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad(set_to_none=False)


@pytest.mark.parametrize("change", [clear, pytest.param(clear_in_place, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("dtype", "num_ranks", "options"), MODES)
def test_zero_grad_around_steps_changes_nothing(ranks, undisturbed, dtype, num_ranks, options, change):
    expected = undisturbed(dtype, num_ranks, options)
    for found in ranks(num_ranks).run(train_with, dtype, options, change):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def read_gradients(dtype):
    """Gradients of this rank as a loop reads them after each micro-batch, and those that are summed."""
    run, seen = make_run(model_of(dtype), degree=1), []
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
            gradients = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
            copied = copy.deepcopy(run.model)
            assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        seen.append(torch.cat([gradient.double().flatten() for gradient in gradients.values()]))
        step.update()
        assert all(isinstance(parameter, nn.Parameter) for parameter in run.model.parameters())
    run.close()
    return seen


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_gradients_of_bfloat16_weights_are_read_as_those_of_float64_weights_are(ranks, num_ranks):
    """Where one rank alone holds all micro-batches, and where each has some."""
    exact, narrow = (ranks(num_ranks).run(read_gradients, dtype)[0] for dtype in (torch.float64, torch.bfloat16))
    assert len(exact) == STEPS
    for of_float64, of_bfloat16 in zip(exact, narrow):
        norm = torch.linalg.vector_norm(of_float64)
        assert norm > 0 and torch.linalg.vector_norm(of_float64 - of_bfloat16) < 0.05 * norm


def test_an_optimizer_of_other_weights_is_left_alone_and_runs_that_are_gone_refuse_nothing():
    model, other = model_of(), nn.Linear(2, 2)
    run = make_run(model, degree=1)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    optimizer = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=1.0)
    with pytest.raises(InputError, match=r"SGD.step\(\) would update tokens.weight.*optimizer=, lr="):
        optimizer.step()
    del run
    gc.collect()
    optimizer.step()
