"""Parameter groups of optimizers of one's own: the same positions on every rank, and harmless without parameters."""

import pytest
import torch

import lengthwise as lw
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_own_optimizers import loop_on_one_device
from tests.session.test_prepare import OPTIONS, assert_equal_weights

COMMON = {name: value for name, value in OPTIONS.items() if name != "lr"} | {"memory_gib": 200, "check": False}


class LooksAtTheFirst(torch.optim.Optimizer):
    """SGD with weight decay that asks the first parameter of each group, which it takes to be there."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            decay = torch.full((), 1 - group["lr"] * group["weight_decay"], dtype=group["params"][0].dtype)
            for parameter in group["params"]:
                parameter.mul_(decay).sub_(parameter.grad, alpha=group["lr"])


MADE_BY = {"torch": lambda groups: torch.optim.SGD(groups, lr=0.1), "looks at the first": LooksAtTheFirst}


def of_parts(model, make):
    """Groups by the part of the model, so that a rank updates nothing of some."""
    names_of = {id(parameter): name.split(".")[0] for name, parameter in model.named_parameters()}
    parts = list(dict.fromkeys(names_of.values()))

    def optimizer(groups):
        everyone = [parameter for group in groups for parameter in group["params"]]
        return make([{"params": [p for p in everyone if names_of[id(p)] == part], "part": part} for part in parts])

    return optimizer


def change_by_position(optimizer, step):
    """What a loop changes after a step."""
    optimizer.param_groups[-1]["weight_decay"] = 0.5
    for position, group in enumerate(optimizer.param_groups[:-1]):
        group["weight_decay"] = 0.3 * position * (1 + step)


def trained(kind):
    """Weights of a run that changes weight decays by position, and the parts that groups are of."""
    as_started_by_torchrun()
    model = models.gpt()
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), optimizer=of_parts(model, MADE_BY[kind]), **COMMON)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        change_by_position(run.state.optimizer, step.number)
    groups = [(group["part"], len(group["params"])) for group in run.state.optimizer.param_groups]
    run.close()
    return weights_of(model), groups


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", MADE_BY)
def test_constants_that_change_by_the_position_of_a_group_are_those_of_one_device(ranks, kind):
    made = {}

    def plain(groups):
        optimizer, steps = made["optimizer"](groups), iter(range(100))
        optimizer.register_step_post_hook(lambda *_: change_by_position(optimizer, next(steps)))
        return optimizer

    def note(model):
        made["optimizer"] = of_parts(model, MADE_BY[kind])

    weights = loop_on_one_device(plain, None, None, noting=note)[1]
    outcomes = ranks(2).run(trained, kind)
    assert_equal_weights(outcomes[0][0], weights)
    assert [part for part, _ in outcomes[0][1]] == [part for part, _ in outcomes[1][1]]
    assert any(not number for _, groups in outcomes for _, number in groups)


def test_a_group_without_parameters_is_harmless_where_matrices_alone_are_trained(caplog):
    model = models.gpt()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)

    def with_an_empty_group(groups):
        everyone = [parameter for group in groups for parameter in group["params"]]
        return torch.optim.SGD([{"params": [], "lr": 0.3}, {"params": everyone, "lr": 0.1}])

    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), optimizer=with_an_empty_group, **COMMON)
    before = weights_of(model)
    step_through(run)
    run.close()
    assert (weights_of(model)["head.weight"] != before["head.weight"]).any()
    assert "makes 1 group without any parameter (position 0)" in caplog.text
