"""Parameters that no sequence of a step uses stay as they are, as in a loop of torch, whatever plans and optimizers."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import lengthwise as lw
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.structure_runs import LENGTHS, OPTIONS, plan_of
from tests.session.test_prepare import EXACT, assert_equal_weights

CLASS = 16
"""How many ids of tokens go to the same expert."""
STEPS = ((0, 1), (0,), (2,), (0, 2), (1, 2))
"""Experts that tokens of each step go to; the last one is never used."""
NAMES = [f"blocks.{layer}.experts.{expert}.weight" for layer in range(3) for expert in range(4)]
OPTIMIZERS = {
    "adamw": ("adamw", partial(torch.optim.AdamW, betas=(0.9, 0.95))),
    "sgd": ("sgd", partial(torch.optim.SGD, momentum=0.9)),
    "nadam": (partial(torch.optim.NAdam, eps=1e-4), partial(torch.optim.NAdam, eps=1e-4)),
}
"""What prepare takes, and what a loop of one's own has."""
OTHERS = [("adamw", "by-layer"), ("sgd", "whole"), ("nadam", "whole"), ("nadam", "by-layer")]


class RoutedBlock(models.Block):
    """Sends every token to the expert of its kind, as a mixture of experts in a list does."""

    def __init__(self, width):
        super().__init__(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, kinds):
        x = super().forward(x)
        for number, expert in enumerate(self.experts):
            chosen = kinds == number
            if chosen.any():
                x = x.index_put((chosen,), x[chosen] + expert(x[chosen]))
        return x


class Routed(models.GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock(24) for _ in self.blocks)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x, idx // CLASS)
        logits = self.head(self.norm(x))
        loss = None if targets is None else models.F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def routed():
    torch.manual_seed(0)
    return Routed().double()


def rows():
    rng = np.random.default_rng(0)
    return [
        CLASS * rng.choice(experts, length) + rng.integers(0, CLASS // 2, length)
        for experts in STEPS
        for length in LENGTHS
    ]


def train_alone(make):
    model, number = routed(), len(LENGTHS)
    groups = [
        {"params": [x for x in model.parameters() if x.dim() > 1], "weight_decay": 0.1},
        {"params": [x for x in model.parameters() if x.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer, losses, used = make(groups, lr=1e-2), [], []
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        batch = rows()[step * number : (step + 1) * number]
        loss = sum(models.sum_of_losses(model, row) for row in batch) / sum(len(row) - 1 for row in batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        used.append({name for name in NAMES if model.get_parameter(name).grad is not None})
    return losses, used, weights_of(model)


def train(folder, *, steps, optimizer, kinds, weights="whole"):
    """Losses of the steps that are left up to ``steps``, planned in turn as ``kinds`` say, and the weights then."""
    as_started_by_torchrun()
    model = routed()
    options = OPTIONS | {"optimizer": optimizer, "lr": 1e-2, "weight_decay": 0.1, "weights": weights}
    run = lw.prepare(model, rows(), steps=steps, **options)
    if folder.exists():
        run.resume(folder)
    losses = []
    for step_number in range(run.next_step, steps):
        kind = kinds[step_number % len(kinds)]
        run.planner = partial(plan_of, kind, 3, run.world.size, run.can_recompute)
        step = next(run.steps())
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
    run.save(folder)
    run.close()
    return losses, weights_of(model)


CASES = [("adamw", "whole"), *(pytest.param(*case, marks=pytest.mark.deep) for case in OTHERS)]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_experts_that_no_token_reaches_stay_as_they_are_on_any_ranks_and_through_checkpoints(
    ranks, tmp_path, name, weights
):
    given, made = OPTIMIZERS[name]
    losses, used, expected = train_alone(made)
    assert len(set.intersection(*used)) < len(set.union(*used)) < len(NAMES), "some in some steps, some in none"
    run = partial(train, tmp_path / "steps", optimizer=given, weights=weights)
    first = ranks(3).run(partial(run, steps=3, kinds=("alone", "ulysses", "stages")))[0]
    state = json.loads((tmp_path / "steps/step_00000003/state.json").read_text())
    assert state["unused_parameters"] == {name: sum(name not in seen for seen in used[:3]) for name in NAMES}
    second = ranks(2).run(partial(run, steps=4, kinds=("ring",)))[0]
    third = ranks(1).run(partial(run, steps=5, kinds=("alone",)))[0]
    np.testing.assert_allclose(first[0] + second[0] + third[0], losses, rtol=EXACT)
    assert_equal_weights(third[1], expected)
