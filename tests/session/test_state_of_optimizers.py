"""What an optimizer of one's own keeps of some parameters alone, or in unusual forms, is there after a resume."""

import numpy as np
import pytest
import torch

from lengthwise.core.errors import LengthwiseError
from tests.session.loops import train_in_parts
from tests.session.test_own_optimizers import loop_on_one_device
from tests.session.test_prepare import EXACT, OPTIONS, STEPS, assert_equal_weights

LEAST = 100
"""Numbers of a parameter from which on state is another; those of trials are smaller."""
OWN = {key: value for key, value in OPTIONS.items() if key != "steps"}


class BySize(torch.optim.Optimizer):
    """Codes of eight bits and more of large parameters, momentum of others, and a count of all updates beside."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["updates"] = self.state["all"].get("updates", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.numel() < LEAST:
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                else:
                    momentum = self.of_large(parameter, state)
                if self.state["all"]["updates"] > 1 and parameter.dim() == 1:
                    momentum = state.setdefault("late", torch.zeros_like(parameter)).add_(momentum)
                parameter.sub_(momentum, alpha=group["lr"])

    def of_large(self, parameter, state):
        if "codes" not in state:
            state.update(history=[], master=parameter.double().clone(), none=None, shape=("of", parameter.shape))
            previous = torch.zeros_like(parameter)
        else:
            previous = state["codes"].to(parameter.dtype) * state["scale"]
        assert state["none"] is None and state["shape"] == ("of", parameter.shape)
        momentum = 0.9 * previous + parameter.grad
        state["scale"] = momentum.abs().max() / 127
        state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
        state["history"] = [*state["history"], {"of": parameter.grad.clone()}][-2:]
        return sum(entry["of"] for entry in state["history"]) + 0.1 * (parameter - state["master"]) + momentum


class Counts(torch.optim.SGD):
    """Counts its steps in an attribute, of which its own ``state_dict`` tells."""

    def __init__(self, groups):
        super().__init__(groups, lr=0.1, momentum=0.5)
        self.num_steps = 0

    def state_dict(self):
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict):
        own = dict(state_dict)
        self.num_steps = own.pop("num_steps")
        super().load_state_dict(own)

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        super().step()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.mul_(1 - 0.01 * self.num_steps)


class KeepsASet(torch.optim.SGD):
    """Keeps of large parameters what no checkpoint has."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() >= LEAST:
                    self.state[parameter]["kinds"] = {"large"}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        *(pytest.param(BySize, *others, marks=pytest.mark.deep) for others in ((1, 1), (1, 3))),
        (BySize, 2, 1),
        (Counts, 2, 1),
    ],
)
def test_what_a_trial_does_not_see_is_there_after_a_resume(ranks, kind, first, second, tmp_path):
    losses, weights = loop_on_one_device(kind, weight_decay=None)
    options = OWN | {"optimizer": kind}
    before = ranks(first).run(train_in_parts, tmp_path, first=True, last=2, options=options)[0]
    after = ranks(second).run(train_in_parts, tmp_path, first=False, last=STEPS, options=options)[0]
    np.testing.assert_allclose(before[0] + after[0], losses, rtol=EXACT)
    assert_equal_weights(after[1], weights)


def refusal_of_save(folder):
    with pytest.raises(LengthwiseError) as refusal:
        train_in_parts(folder, first=True, last=1, options=OWN | {"optimizer": KeepsASet})
    return str(refusal.value)


def test_a_save_of_what_checkpoints_do_not_have_is_refused_on_all_ranks_before_it_is_written(ranks, tmp_path):
    for message in ranks(2).run(refusal_of_save, tmp_path):
        assert "optimizer=KeepsASet keeps kinds as a set, and checkpoints keep tensors, numbers" in message
        assert "no checkpoint is complete yet" in message
    assert not list(tmp_path.iterdir())
