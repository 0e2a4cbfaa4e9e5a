"""Losses with a kink after their mean: exact sequence by sequence where the model makes them, else refused."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from tests.runtime.harness import with_check
from tests.session.structure_runs import OPTIONS, outcomes, plan_of, rows
from tests.session.structures import LAYERS, Plain

FLOOD = 0.5
"""Below every loss here, so that values are those of a loss without a kink."""


class Flooded(Plain):
    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        return logits, None if loss is None else (loss - FLOOD).abs() + FLOOD


class Limited(Plain):
    """Kinks by token, and one of weights alone: plans change neither."""

    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        if targets is not None:
            by_token = F.cross_entropy(logits[0], targets[0], ignore_index=-100, reduction="none").clamp(max=3.0)
            loss = by_token.sum() / (targets != -100).sum() + 0.1 * (self.head.weight.norm() - 1).relu()
        return logits, loss


def test_a_model_that_floods_its_loss_is_computed_sequence_by_sequence_and_one_that_limits_tokens_is_not(ranks):
    for flooded in ranks(1).run(with_check, outcomes, f"test_bent_losses.{Flooded.__name__}"):
        assert flooded["alone"] < 1e-12
    with pytest.raises(CheckError, match=r"Flooded has an operation with a kink after its mean .*AbsBackward0"):
        lw.prepare(Flooded().double(), rows(), steps=1, packing="always", **OPTIONS)
    run = lw.prepare(Limited().double(), rows(), steps=1, packing="always", **OPTIONS)
    run.close()


def by_sequence(model, micro_batch):
    """A mean of what each sequence lost, at least ``FLOOD`` of each, by targets."""
    logits, _ = model(**micro_batch.inputs)
    parts = zip(
        logits[0].split(micro_batch.pack.lengths), micro_batch.targets.flatten().split(micro_batch.pack.lengths)
    )
    losses = [
        F.cross_entropy(part, targets, reduction="sum", ignore_index=-100)
        for part, targets in parts
        if (targets != -100).any()
    ]
    return sum(loss.clamp(min=FLOOD) for loss in losses) / micro_batch.num_targets


def of_weights(model, micro_batch):
    """A kink of weights alone, as many as the pack has slots."""
    slots = micro_batch.inputs["idx"].shape[1]
    return (torch.cat([model.head.weight.flatten()[:slots]]).abs().sum() - FLOOD).relu()


@pytest.mark.parametrize(
    ("loss_of", "options"),
    [
        (lambda model, micro_batch: (model(**micro_batch.inputs)[1] - FLOOD).abs() + FLOOD, {}),
        (lambda model, micro_batch: model(**micro_batch.inputs)[1].clamp(max=100.0), {"mean_over": "targets"}),
        (by_sequence, None),
        (lambda model, micro_batch: model(**micro_batch.inputs)[1] + of_weights(model, micro_batch), None),
    ],
    ids=["flooded", "limited", "by sequence", "of weights"],
)
def test_a_loss_that_a_loop_bends_is_refused_unless_each_sequence_has_its_own(loss_of, options):
    torch.manual_seed(0)
    model = Plain().double()
    run = lw.prepare(model, rows(), steps=1, **OPTIONS)
    run.planner = partial(plan_of, "alone", LAYERS, 1, True)
    step = next(run.steps())
    micro_batches = iter(step)
    step.backward(model(**next(micro_batches).inputs)[1])  # of one sequence
    micro_batch = next(micro_batches)
    if options is None:
        step.backward(loss_of(model, micro_batch), mean_over="targets")
    else:
        with pytest.raises(CheckError, match=r"the loss of Plain has an operation with a kink after its mean"):
            step.backward(loss_of(model, micro_batch), **options)
    run.close()
