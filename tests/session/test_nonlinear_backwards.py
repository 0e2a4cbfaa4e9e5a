"""Backwards that are not linear get gradients at the scale of the step, where labels leave out targets as well."""

import numpy as np
import pytest
import torch
from torch import Tensor

import lengthwise as lw
from tests.session.models import VOCAB
from tests.session.structure_runs import LENGTHS, LR, OPTIONS
from tests.session.structures import Plain

MOST = 1e-3
"""Of a gradient that is clamped; many are larger."""
STEPS = 2


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-MOST, MOST)


class ByFunction(Plain):
    def run(self, x, idx):
        return super().run(Clamped.apply(x), idx)


class ByModuleHook(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].mlp.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-MOST, MOST),))


class ByTensorHook(Plain):
    def embed(self, idx):
        x = super().embed(idx)
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-MOST, MOST))
        return x


def items():
    """Every third label alone counts, and of one sequence none."""
    drawn = np.random.default_rng(0)
    for number, length in enumerate(LENGTHS):
        labels = np.where(np.arange(length) % 3 == 0, drawn.integers(0, VOCAB, length), -100)
        yield {
            "input_ids": drawn.integers(0, VOCAB, length),
            "labels": np.full(length, -100) if number == 2 else labels,
        }


def weights_of_a_loop(model):
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=LR), list(items())
    total = sum(int((row["labels"] != -100).sum()) for row in rows)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for row in rows:
            if count := int((row["labels"] != -100).sum()):
                tokens, labels = (torch.as_tensor(row[name])[None] for name in ("input_ids", "labels"))
                (model(tokens, labels)[1] * count / total).backward()
        optimizer.step()
    return [value.detach().clone() for value in model.parameters()]


def made(kind):
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", [ByFunction, ByModuleHook, pytest.param(ByTensorHook, marks=pytest.mark.deep)])
def test_gradients_that_are_clamped_on_the_way_are_those_of_a_plain_loop(kind):
    expected, plain = weights_of_a_loop(made(kind)), weights_of_a_loop(made(Plain))
    assert max(float((a - b).abs().max()) for a, b in zip(expected, plain)) > 1e-3, "it clamps"
    model = made(kind)
    options = OPTIONS | {"objective": "every-token", "steps": STEPS}
    run = lw.prepare(model, list(items()), recompute="none", **options)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
    assert run.counts_targets
    assert max(float((a - b.detach()).abs().max()) for a, b in zip(expected, model.parameters())) < 1e-12
    run.close()


def test_targets_of_a_linear_backward_are_not_counted():
    run = lw.prepare(made(Plain), list(items()), **OPTIONS | {"objective": "every-token", "steps": 1})
    assert not run.counts_targets
    run.close()
