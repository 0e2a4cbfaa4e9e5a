"""Optimizers of torch that `prepare` has no name for train what they train in a loop of one's own, and resume."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, train_in_parts, weights_of
from tests.session.test_prepare import EXACT, OPTIONS, STEPS, assert_equal_weights, batches_of

pytestmark = pytest.mark.usefixtures("unchecked")


class NormedMatrices(torch.optim.Optimizer):
    """Follows each matrix's momentum divided by its spectral norm, and each vector's gradient divided by its length."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                direction = parameter.grad / (1e-3 + parameter.grad.norm())
                if parameter.dim() == 2:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad)
                    direction = momentum / (1e-3 + torch.linalg.matrix_norm(momentum, 2))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


class EightBits(torch.optim.Optimizer):
    """Momentum in codes of eight bits and a scale for each parameter, and a count of steps that is a plain number."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                momentum = parameter.grad
                if "codes" in state:
                    momentum = momentum + 0.9 * (state["codes"].to(parameter.dtype) - 128) * state["scale"]
                state["scale"] = momentum.abs().max().clamp(min=1e-12) / 127
                state["codes"] = (momentum / state["scale"] + 128).round().to(torch.uint8)
                parameter.sub_(momentum, alpha=group["lr"] / state["step"])


class CountsInGroups(torch.optim.Optimizer):
    """Momentum of 16 bits and a plain float of each parameter, and a count of steps in each group."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.5), "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            group["seen"] = (group["steps"], "steps")
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", 1e7) + float(parameter.grad.norm())  # 8 digits, and the changes
                momentum = state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
                momentum.mul_(group["betas"][0]).add_(parameter.grad / (state["sum"] - 1e7))
                parameter.sub_(momentum, alpha=group["lr"] / group["steps"])


class OfAllGradients(torch.optim.Optimizer):
    """Follows gradients divided by the norm of all of them."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


def rates_of_groups(groups):
    """What says a rate for matrices and another, torch's default, for vectors."""
    return torch.optim.SGD([{**groups[0], "lr": 0.1}, {**groups[1], "lr": 0.001}])


def muon_and_adamw(groups):
    """What a user of Muon writes: it takes the matrices of layers, AdamW the rest."""
    (matrices, vectors), inner = (group["params"] for group in groups), 24
    layers = [x for x in matrices if x.shape[0] != models.VOCAB and x.shape != (96, inner)]
    rest = [x for x in matrices if not any(x is other for other in layers)]
    muon = torch.optim.Muon([{"params": layers, "weight_decay": 0.1}])
    adamw = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    return SimpleNamespace(
        param_groups=[*muon.param_groups, *adamw.param_groups],
        zero_grad=lambda: [muon.zero_grad(), adamw.zero_grad()],
        step=lambda: [muon.step(), adamw.step()],
    )


OPTIMIZERS = {
    "nadam": partial(torch.optim.NAdam, eps=1e-4),  # which does not amplify rounding
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, alpha=0.8),
    "matrices": NormedMatrices,
    "muon": torch.optim.Muon,
    "eight bits": EightBits,
    "counts in groups": CountsInGroups,
}
ALONE = {"muon": muon_and_adamw}
"""What a loop of one's own has instead."""
DECAYS = ("nadam", "rmsprop", "matrices", "muon")
"""Those that know weight decay."""
QUICK = ("muon",)


def loop_on_one_device(make, lr=1e-2, weight_decay=0.1, noting=lambda model: None):
    """``lr`` of each step or of all steps, ``weight_decay`` of matrices; None: what ``make`` says.

    ``noting``: is told of the model first.
    """
    model, rows, losses = models.gpt(), models.rows(), []
    noting(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    decays = [{}, {}] if weight_decay is None else [{"weight_decay": weight_decay}, {"weight_decay": 0.0}]
    optimizer = make([{"params": matrices, **decays[0]}, {"params": vectors, **decays[1]}])
    ratios = [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(batches_of(rows, num_steps=STEPS)):
        for group, ratio in zip(optimizer.param_groups, ratios) if lr is not None else ():
            group["lr"] = (lr(step) if callable(lr) else lr) * ratio
        optimizer.zero_grad()
        loss = sum(models.sum_of_losses(model, rows[i]) for i in batch) / sum(len(rows[i]) - 1 for i in batch)
        loss.backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 1.0 / (float(norm) + 1e-6))
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.deep] * (n not in QUICK)) for n in OPTIMIZERS])
def test_an_optimizer_of_ones_own_trains_and_resumes_on_any_number_of_ranks(ranks, name, tmp_path):
    losses, weights = loop_on_one_device(ALONE.get(name, OPTIMIZERS[name]))
    options = {key: value for key, value in OPTIONS.items() if key != "steps"}
    options |= {"optimizer": OPTIMIZERS[name], "recompute": "none"} | ({"weight_decay": 0.1} if name in DECAYS else {})
    first = ranks(2).run(train_in_parts, tmp_path, first=True, last=1, options=options)[0]
    second = ranks(3).run(train_in_parts, tmp_path, first=False, last=STEPS, options=options)[0]
    np.testing.assert_allclose(first[0] + second[0], losses, rtol=EXACT)
    assert_equal_weights(second[1], weights)


def train_with(every_options):
    """Losses, weights and rates by each of several options, without a rate of prepare but what they have."""
    as_started_by_torchrun()
    outcomes = []
    for options in every_options:
        model, rates, losses = models.gpt(), [], []
        common = {name: value for name, value in OPTIONS.items() if name != "lr"} | {"check": False, "memory_gib": 40}
        run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), **common | options)
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            result = step.update()
            losses.append(result.loss)
            rates.append(result.lr)
        run.close()
        outcomes.append((losses, weights_of(model), rates))
    return outcomes


def falling(step):
    return 0.1 / (1 + step)


CONSTANTS = [
    ({"optimizer": partial(torch.optim.SGD, lr=0.2, weight_decay=0.5)}, (None, None), [0.2] * STEPS),
    ({"optimizer": torch.optim.NAdam, "weight_decay": 0.3}, (None, 0.3), [2e-3] * STEPS),
    ({"optimizer": rates_of_groups}, (None, None), [0.1] * STEPS),
    ({"optimizer": rates_of_groups, "lr": 0.1}, (0.1, None), [0.1] * STEPS),
    ({"optimizer": rates_of_groups, "lr": falling}, (falling, None), [falling(step) for step in range(STEPS)]),
]
"""Options of prepare, rate and weight decay of a loop of one's own (None: the optimizer's), and the rates of steps."""


@pytest.mark.parametrize("num_ranks", [1, *(pytest.param(n, marks=pytest.mark.deep) for n in (2, 3))])
def test_a_rate_and_a_weight_decay_that_prepare_is_not_given_are_those_of_the_optimizer(ranks, num_ranks):
    outcomes = ranks(num_ranks).run(train_with, [options for options, _, _ in CONSTANTS])[0]
    for (options, (lr, decay), expected), (losses, weights, rates) in zip(CONSTANTS, outcomes):
        losses_alone, weights_alone = loop_on_one_device(options["optimizer"], lr, decay)
        np.testing.assert_allclose(losses, losses_alone, rtol=EXACT)
        assert_equal_weights(weights, weights_alone)
        assert rates == expected


def refusal_of(optimizer):
    with pytest.raises(InputError) as refusal:
        train_with([{"optimizer": optimizer}])
    return str(refusal.value)


def test_an_optimizer_that_couples_parameters_is_refused_on_several_ranks(ranks):
    for message in ranks(2).run(refusal_of, OfAllGradients):
        assert "OfAllGradients updates a parameter otherwise where there are others" in message
        assert "each of the 2 ranks" in message and "Train on 1 rank" in message
    [(losses, _, _)] = train_with([{"optimizer": OfAllGradients, "memory_gib": 80}])
    np.testing.assert_allclose(losses, loop_on_one_device(OfAllGradients, None, None)[0], rtol=EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": partial(torch.optim.SGD, lr=0.1), "lr": 0.05}, "lr=0.05 is asked for, and .*SGD has lr=0.1:"),
        ({"optimizer": rates_of_groups, "lr": 0.05}, "lr=0.05 is asked for, and .* has lr=0.1 and 0.001"),
        ({"optimizer": partial(torch.optim.SGD, lr=1e-3), "lr": falling}, "a function of the step, and .* lr=0.001"),
        (
            {"optimizer": lambda groups: torch.optim.SGD([groups[0], {**groups[1], "lr": 0.01}]), "lr": falling},
            "has lr=0.01 for 1 of its 2 groups",
        ),
        (
            {"optimizer": partial(torch.optim.SGD, weight_decay=0.5), "weight_decay": 0.1},
            "weight_decay=0.1 is asked for, and optimizer=SGD has weight_decay=0.5",
        ),
        ({"optimizer": torch.optim.Rprop, "weight_decay": 0.1}, "Rprop updates parameters as without"),
        ({"optimizer": OptimizerSettings(), "weight_decay": 0.3}, r"OptimizerSettings\(...\) has weight_decay=0.1"),
    ],
)
def test_a_constant_that_is_said_twice_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        train_with([options])


def made_of_words(groups):
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: optimizer.state[optimizer.param_groups[0]["params"][0]].update(seen={"three"})
    )
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.LBFGS, "cannot be made of parameter groups.*LBFGS doesn't support per-parameter options"),
        (lambda groups: None, "makes a NoneType, which is no torch.optim.Optimizer"),
        (made_of_words, "keeps seen as a set, and checkpoints keep tensors, numbers"),
        ("adamm", "did you mean adamw|Input should be"),
        (torch.optim.SGD([torch.zeros(1)]), r"optimizer: SGD is made already, .*functools.partial\(SGD, ...\)"),
        (lambda groups: torch.optim.SGD(groups[:1]), "leaves out 26 of the 41 parameters .*, and takes 0 others"),
        (
            lambda groups: torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
            "leaves out 41 of the 41 parameters .*, and takes 1 others",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_training(optimizer, told):
    with pytest.raises(InputError, match=told):
        lw.prepare(models.gpt(), models.rows(), cost=models.mixed_cost(), optimizer=optimizer, steps=1, verbose=False)


def test_a_rate_is_that_of_a_scheduler_of_torch_where_a_function_gives_it():
    """On the loss of each step; a scheduler itself is refused by one sentence."""
    follows = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(follows, factor=0.5, patience=0)
    options = OPTIONS | {"cost": models.mixed_cost(), "memory_gib": 40, "check": False}
    with pytest.raises(
        InputError, match=r"lr: ReduceLROnPlateau sets .*lr=lambda step: scheduler.get_last_lr\(\)\[0\]"
    ):
        lw.prepare(models.gpt(), models.rows(), **options | {"lr": scheduler})
    run, rates = (
        lw.prepare(models.gpt(), models.rows(), **options | {"lr": lambda step: scheduler.get_last_lr()[0]}),
        [],
    )
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        result = step.update()
        rates.append(result.lr)
        scheduler.step(1.0)  # it does not fall
    run.close()
    assert rates == [1e-2, 1e-2, 5e-3]


def trained_state(optimizer):
    as_started_by_torchrun()
    run = lw.prepare(
        models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, optimizer=optimizer,
        **OPTIONS | {"recompute": "none", "weights": "by-layer", "weight_decay": 0.1},
    )  # fmt: skip
    losses, _, _ = step_through(run)
    run.close()
    return losses


@pytest.mark.deep
def test_an_optimizer_of_ones_own_may_have_its_weights_gathered_by_layer(ranks):
    losses, _ = loop_on_one_device(NormedMatrices)
    for found in ranks(3).run(trained_state, NormedMatrices):
        np.testing.assert_allclose(found, losses, rtol=EXACT)
