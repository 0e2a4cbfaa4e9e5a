"""Optimizers of torch that `prepare` has no name for train what they train in a loop of one's own, and resume."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, train_in_parts, weights_of
from tests.session.test_prepare import EXACT, OPTIONS, STEPS, assert_equal_weights, batches_of


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
}
ALONE = {"muon": muon_and_adamw}
"""What a loop of one's own has instead."""
QUICK = ("matrices", "muon")


def loop_on_one_device(make):
    model, rows, losses = models.gpt(), models.rows(), []
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = make([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for batch in batches_of(rows, num_steps=STEPS):
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
    options |= {"optimizer": OPTIMIZERS[name], "recompute": "none"}
    first = ranks(2).run(train_in_parts, tmp_path, first=True, last=2, options=options)[0]
    second = ranks(3).run(train_in_parts, tmp_path, first=False, last=STEPS, options=options)[0]
    np.testing.assert_allclose(first[0] + second[0], losses, rtol=EXACT)
    assert_equal_weights(second[1], weights)


def made_of_words(groups):
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: optimizer.state[optimizer.param_groups[0]["params"][0]].update(seen="three")
    )
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.LBFGS, "cannot be made of parameter groups.*LBFGS doesn't support per-parameter options"),
        (lambda groups: None, "makes a NoneType, which is no torch.optim.Optimizer"),
        (made_of_words, "keeps seen as a str, and checkpoints keep tensors and numbers"),
        ("adamm", "did you mean adamw|Input should be"),
        (torch.optim.SGD([torch.zeros(1)]), r"optimizer: SGD is made already, .*functools.partial\(SGD, ...\)"),
        (lambda groups: torch.optim.SGD(groups[:1]), "leaves out 1 of the 2 parameters .*, and takes 0 others"),
        (lambda groups: torch.optim.SGD([torch.zeros(1)]), "leaves out 2 of the 2 parameters .*, and takes 1 others"),
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
    assert rates == [1e-2, 1e-2, 5e-3, 2.5e-3]


def trained_state(optimizer):
    as_started_by_torchrun()
    run = lw.prepare(
        models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, optimizer=optimizer,
        **OPTIONS | {"recompute": "none", "weights": "by-layer"},
    )  # fmt: skip
    losses, _, _ = step_through(run)
    run.close()
    return losses


def test_an_optimizer_of_ones_own_may_have_its_weights_gathered_by_layer(ranks):
    losses, _ = loop_on_one_device(NormedMatrices)
    for found in ranks(3).run(trained_state, NormedMatrices):
        np.testing.assert_allclose(found, losses, rtol=EXACT)
