"""Losses that are no mean over the targets of a step, as some sequences alone do not show."""

import logging

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from tests.session import models
from tests.session.loops import weights_of
from tests.session.structure_runs import LR, OPTIONS
from tests.session.test_prepare import assert_equal_weights

NOTED = "for several sequences at once is not the mean of theirs by their targets"


def rows(lowest=0):
    return [np.random.default_rng(n).integers(lowest, models.VOCAB, length) for n, length in enumerate((13, 5, 21, 9))]


class Counted(models.GPT):
    """Leaves tokens 0 out, and says so to cross_entropy alone."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), ignore_index=0)


class Classes(models.GPT):
    """Weighs classes, all but the first alike."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(models.VOCAB).index_fill(0, torch.tensor([0]), 5.0))

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=self.weights.to(logits))


class AtLeast(models.GPT):
    """Divides by eight where there are fewer targets."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return logits, total / (targets != -100).sum().clamp(min=8)


def prepared(kind, items, **options):
    torch.manual_seed(0)
    model = kind().double()
    return lw.prepare(model, items, **OPTIONS | {"sequences_per_step": len(items), "steps": 1} | options), model


def compute(run, model):
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
    run.close()
    return weights_of(model)


def test_a_label_that_the_loss_leaves_out_and_the_step_counts_is_refused_when_it_comes(ranks):
    run, model = prepared(Counted, rows(lowest=1), step_max_length=40)
    with pytest.raises(CheckError, match=r"the items have 1 token that no example had \(0; "):
        run.step([np.array([3, 4, 0, 5, 6])])
    run.changes_of_items = None  # as at a step between two comparisons
    step = run.step([np.array([3, 4, 0, 5, 6])])
    with pytest.raises(CheckError, match=r"a token has the label 0, .* of Counted leaves out .*ignore_index=0\)"):
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
    run.close()


def test_a_label_that_is_known_to_be_left_out_weighs_nothing():
    run, model = prepared(Counted, rows(), ignore_index=0)
    torch.manual_seed(0)
    alone = Counted().double()
    tokens = [torch.as_tensor(row) for row in rows()]
    losses = [F.cross_entropy(alone(x[None])[0][0, :-1], x[1:], ignore_index=0, reduction="sum") for x in tokens]
    (sum(losses) / sum(int((x[1:] != 0).sum()) for x in tokens)).backward()
    torch.optim.SGD(alone.parameters(), lr=LR).step()
    assert_equal_weights(compute(run, model), weights_of(alone))


@pytest.mark.parametrize("kind", [Classes, AtLeast])
def test_a_loss_with_a_divisor_of_its_own_is_said_to_train_the_mean_of_its_sequences(kind, caplog):
    items = [np.where(np.arange(len(row)) == 2, 0, row) for row in rows()]  # a class of another weight in each
    run, model = prepared(kind, items)
    said = [record.getMessage() for record in caplog.records]
    assert sum(NOTED in line for line in said) == 1 and not any("sequence by sequence: exact" in line for line in said)
    torch.manual_seed(0)
    alone = kind().double()
    total = sum(len(row) - 1 for row in items)
    for row in items:
        tokens = torch.as_tensor(row)[None]
        targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
        (alone(tokens, targets)[1] * (len(row) - 1) / total).backward()
    torch.optim.SGD(alone.parameters(), lr=LR).step()
    run.compare()
    assert_equal_weights(compute(run, model), weights_of(alone))


def test_a_class_of_another_weight_is_refused_when_it_comes_if_no_example_has_it():
    run, model = prepared(Classes, rows(lowest=1), step_max_length=40, packing="always")
    with pytest.raises(CheckError, match=r"the items have 1 token that no example had \(0; "):
        run.step([np.array([3, 4, 0, 5, 6])])
    run.changes_of_items = None  # as at a step between two comparisons
    step = run.step([np.array([3, 4, 0, 5, 6])])
    with pytest.raises(CheckError, match=r"a token has the label 0, .* of Classes leaves out or weighs otherwise"):
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
    run.close()


@pytest.mark.parametrize("kind", [models.GPT, Counted])
def test_a_mean_over_targets_is_one_sequence_by_sequence_too(kind, caplog):
    with caplog.at_level(logging.INFO, logger="lengthwise"):
        run, _ = prepared(kind, rows(lowest=1), packing="never")
    run.close()
    assert not any(NOTED in record.getMessage() for record in caplog.records)
