"""Modules of users that shift the labels they are given, as transformers models do, learn the next token."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.runtime.verify import precision
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.loops import as_started_by_torchrun
from tests.session.structure_runs import PLAIN_SGD

pytestmark = pytest.mark.usefixtures("unchecked")

LENGTHS = (13, 5, 21, 2, 8, 17)
OPTIONS = {
    "sequences_per_step": len(LENGTHS), "order": "corpus", "optimizer": PLAIN_SGD, "lr": 0.3, "clip_norm": 0.0,
    "cost": SimpleCost(capacity=1000), "memory_gib": 1000, "policy": "static", "verbose": False, "steps": 1,
}  # fmt: skip
LOSSES = {
    "mean": lambda logits, labels: F.cross_entropy(logits, labels),
    "sum over count": lambda logits, labels: (
        F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / (labels != -100).sum().clamp(min=1)
    ),
}


class Shifting(models.GPT):
    """Drops the first label and the last logits."""

    loss = "mean"

    def forward(self, idx, labels=None):
        logits = super().forward(idx)[0]
        loss = LOSSES[self.loss](logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, loss


class Taking(models.GPT):
    """Takes next tokens as they are."""

    def forward(self, idx, labels=None):
        return super().forward(idx, labels)


def rows():
    return [np.random.default_rng(number).integers(0, models.VOCAB, length) for number, length in enumerate(LENGTHS)]


def build(kind, loss="mean"):
    torch.manual_seed(0)
    model = kind().double()
    model.loss = loss
    return model


def first_step(kind, has_labels, kind_of_loss="mean"):
    """The loss of a step, and the gradient of the head in it as its change of weights."""
    as_started_by_torchrun()
    model = build(kind, kind_of_loss)
    before = model.head.weight.detach().clone()
    items = [{"input_ids": row, "labels": row} for row in rows()] if has_labels else rows()
    run = lw.prepare(model, items, **OPTIONS)
    step = next(run.steps())
    for micro_batch in step:
        step.backward(model(**micro_batch.inputs)[1])
    loss = step.update().loss
    with run.plain():
        change = model.head.weight.detach() - before
    run.close()
    return loss, change


def expected_step():
    """The same by a loop over sequences: each token predicts the one after it."""
    model = build(Shifting)
    count, total = sum(LENGTHS) - len(LENGTHS), 0.0
    for row in rows():
        tokens = torch.as_tensor(row)[None]
        loss = model(tokens, tokens)[1] * (len(row) - 1) / count
        loss.backward()
        total += loss.item()
    return total, -OPTIONS["lr"] * model.head.weight.grad


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("num_ranks", "loss"),
    [
        (2, "mean"),
        (1, "sum over count"),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in ((1, "mean"), (2, "sum over count"))),
    ],
)
def test_a_module_that_shifts_labels_itself_learns_what_it_learns_alone(ranks, num_ranks, loss):
    total, change = expected_step()
    for has_labels in (False, True):
        for found_loss, found_change in ranks(num_ranks).run(first_step, Shifting, has_labels, loss):
            assert found_loss == pytest.approx(total, abs=1e-12)
            torch.testing.assert_close(found_change, change, rtol=0, atol=1e-12)


def test_one_that_takes_next_tokens_is_given_these():
    total, change = expected_step()
    found_loss, found_change = first_step(Taking, False)
    assert found_loss == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(found_change, change, rtol=0, atol=1e-12)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("dtype", "num_models"),
    [
        (torch.bfloat16, 8),
        *(pytest.param(dtype, 24, marks=pytest.mark.deep) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_labels_are_told_apart_though_16_bits_round_their_losses_alike(dtype, num_models, is_large, monkeypatch):
    """In 16 bits the loss of a sequence is often the same though its first label is another one."""
    if is_large:  # a model of which there is no room for a copy in float64
        monkeypatch.setattr(precision, "FEW_NUMBERS", 0)
    learned = []
    for seed in range(num_models):
        torch.manual_seed(seed)
        model = models.GPT().to(dtype)
        inputs = {"inputs": made_labels} if seed % 2 else {}
        run = lw.prepare(model, models.rows(), check=False, **OPTIONS, **inputs)
        learned.append(run.wrapped_model.labels)
        run.close()
    assert not any(convention.is_in_module for convention in learned)
    assert {convention.made.drops_first for convention in learned if convention.made is not None} == {False}
    assert sum(convention.made is not None for convention in learned) == num_models / 2


def made_labels(micro_batch):
    return {"idx": micro_batch.tokens[None], "targets": micro_batch.targets[None]}
