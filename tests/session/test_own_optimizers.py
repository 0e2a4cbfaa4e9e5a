"""Optimizers of torch that `prepare` has no name for train what they train in a loop of one's own, and resume."""

from functools import partial

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


OPTIMIZERS = {
    "nadam": partial(torch.optim.NAdam, eps=1e-4),  # which does not amplify rounding
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, alpha=0.8),
    "matrices": NormedMatrices,
}


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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.deep] * (n != "matrices")) for n in OPTIMIZERS])
def test_an_optimizer_of_ones_own_trains_and_resumes_on_any_number_of_ranks(ranks, name, tmp_path):
    losses, weights = loop_on_one_device(OPTIMIZERS[name])
    options = {key: value for key, value in OPTIONS.items() if key != "steps"}
    options |= {"optimizer": OPTIMIZERS[name], "recompute": "none"}
    first = ranks(2).run(train_in_parts, tmp_path, first=True, last=2, options=options)[0]
    second = ranks(3).run(train_in_parts, tmp_path, first=False, last=STEPS, options=options)[0]
    np.testing.assert_allclose(first[0] + second[0], losses, rtol=EXACT)
    assert_equal_weights(second[1], weights)


def made_of_ints(groups):
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: optimizer.state[optimizer.param_groups[0]["params"][0]].update(seen=3)
    )
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.LBFGS, "cannot be made of parameter groups.*LBFGS doesn't support per-parameter options"),
        (torch.optim.Muon, "cannot be made of parameter groups.*2D"),
        (lambda groups: None, "makes a NoneType, which is no torch.optim.Optimizer"),
        (made_of_ints, "keeps seen as a int, and checkpoints keep tensors"),
        ("adamm", "did you mean adamw|Input should be"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_training(optimizer, told):
    with pytest.raises(InputError, match=told):
        lw.prepare(models.gpt(), models.rows(), cost=models.mixed_cost(), optimizer=optimizer, steps=1, verbose=False)


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
