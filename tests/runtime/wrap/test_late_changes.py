"""Hooks and forwards that come after a model was compared are let through if they only look, or are linear."""

import pytest
import torch
from torch import nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.forward_patch import PreparedForward
from lengthwise.runtime.wrap.late_changes import LateChanges


def watched(is_plain=False):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model, LateChanges(model, is_plain=lambda: is_plain)


def called(model, changes, step=1):
    changes.check(step)
    model(torch.ones(1, 4, 3, requires_grad=True)).sum().backward()


ALLOWED = {
    "none": lambda model: None,
    "looks": lambda model: model[1].register_forward_hook(lambda module, args, output: None),
    "returns its output": lambda model: model[1].register_forward_hook(lambda module, args, output: output),
    "looks before": lambda model: model[1].register_forward_pre_hook(
        lambda module, args, kwargs: None, with_kwargs=True
    ),
    "returns its arguments": lambda model: model[1].register_forward_pre_hook(
        lambda module, args, kwargs: ((*args,), {**kwargs}), with_kwargs=True
    ),
    "returns its input": lambda model: model[1].register_forward_pre_hook(lambda module, args: args[0]),
    "looks at gradients": lambda model: model[1].weight.register_hook(lambda gradient: None),
    "looks at gradients of a module": lambda model: model[1].register_full_backward_hook(lambda *gradients: None),
    "halves gradients of a module": lambda model: model[1].register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] / 2,)
    ),
    "turns gradients of each token": lambda model: model[1].register_full_backward_pre_hook(
        lambda module, outputs: (outputs[0].flip(-1),)
    ),
    "returns gradients of a module": lambda model: model[1].register_full_backward_hook(
        lambda module, inputs, outputs: inputs
    ),
    "masks rows": lambda model: model[1].weight.register_hook(lambda gradient: gradient * torch.tensor([[1.0], [0.0]])),
}
CHANGES_IT = r"a forward hook on 1, registered after prepare, changes what the module takes or gives"
REFUSED = {
    "changes an output": (
        lambda model: model[1].register_forward_hook(lambda module, args, output: output - output.mean()), CHANGES_IT
    ),
    "changes an input": (
        lambda model: model[1].register_forward_pre_hook(lambda module, args: (args[0] * args[0].shape[1],)), CHANGES_IT
    ),
    "adds to a gradient": (
        lambda model: model[1].weight.register_hook(lambda gradient: gradient + 0.01),
        r"a hook on the gradient of 1.weight, registered after prepare, is not linear",
    ),
    "clips a gradient": (lambda model: model[1].bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)), "1.bias"),
    "centres gradients of a module": (
        lambda model: model[1].register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] - inputs[0].mean(),)),
        r"a backward hook on 1, registered after prepare, changes gradients by more than a factor for each token",
    ),
    "scales gradients of a module by their norm": (
        lambda model: model[1].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] / outputs[0].norm(),)),
        "a backward hook on 1",
    ),
    "a gradient when it was added up": (
        lambda model: model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None),
        r"1\.weight has a hook that runs after its gradient was accumulated, registered after prepare",
    ),
    "another forward": (
        lambda model: setattr(model[1], "forward", lambda x: x), "the forward of 1 was replaced after prepare"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_looks_or_is_linear_is_let_through(name):
    model, changes = watched()
    called(model, changes)
    ALLOWED[name](model)
    called(model, changes, step=2)
    called(model, changes, step=2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_changed_late_is_refused(name):
    register, message = REFUSED[name]
    model, changes = watched()
    called(model, changes)
    handle = register(model)
    with pytest.raises(InputError, match=message):
        called(model, changes, step=2)
    if handle is not None:
        handle.remove()
        called(model, changes, step=3)


def test_the_users_own_calls_may_have_any_hook():
    model, changes = watched(is_plain=True)
    REFUSED["changes an output"][0](model)
    called(model, changes)


def test_hooks_that_record_hear_every_gradient_once():
    model, changes = watched()
    heard = []
    model[1].bias.register_hook(lambda gradient: heard.append(gradient.clone()))
    called(model, changes)
    called(model, changes)
    assert [gradient.tolist() for gradient in heard] == [[4.0, 4.0]] * 2


def test_a_forward_of_this_library_may_go():
    model, _ = watched()
    ours = PreparedForward(model[1], model[1].forward)
    changes = LateChanges(model, is_plain=lambda: False)
    called(model, changes)
    ours.release()
    called(model, changes, step=2)


class Gated(nn.Module):
    """Takes a mask beside what it computes with, and gives a number."""

    def forward(self, x, is_open, places):
        return (x * is_open + places).mean()


def test_gradients_of_modules_that_take_masks_and_give_a_number_may_be_scaled_and_recorded():
    model = nn.ModuleList([nn.Linear(3, 3), Gated()])
    changes, heard = LateChanges(model, is_plain=lambda: False), []
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2, *inputs[1:]))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: heard.append(inputs[0].norm()) or inputs)
    changes.check(1)
    x = model[0](torch.ones(1, 4, 3, requires_grad=True))
    model[1](x, torch.ones(1, 4, 1, dtype=torch.bool), torch.arange(4).view(1, 4, 1)).backward()
    assert len(heard) == 1
