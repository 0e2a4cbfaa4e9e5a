"""What calls of cross_entropy say of labels that they do not count as others."""

import pytest
import torch
from torch.nn import functional as F

from lengthwise.runtime.verify.loss_calls import ObserveLossCalls

LABELS = torch.tensor([1, 2, 1, 4, 2, -100])
ALL_BUT_3 = torch.ones(5).index_fill(0, torch.tensor([3]), 9.0)
OTHERS = {"weight": torch.arange(5.0)}
CASES = {
    "as they are": (lambda x: F.cross_entropy(x, LABELS), {-100}),
    "but the last": (lambda x: F.cross_entropy(x[:-1], LABELS[:-1], ignore_index=0), {0}),
    "without a loss": (lambda x: F.cross_entropy(x, LABELS.clamp(min=0), ignore_index=0), {0}),
    "of a module": (lambda x: torch.nn.NLLLoss(ignore_index=-1)(x[:-1], LABELS[:-1]), {-1}),
    "a part of the loss": (lambda x: 2 * F.cross_entropy(x, LABELS) + x.sum(), {-100}),
    "one class weighs more": (lambda x: F.cross_entropy(x, LABELS, ALL_BUT_3), {-100, 3}),
    "all weigh as much": (lambda x: F.cross_entropy(x, LABELS, torch.full((5,), 2.0)), {-100}),
    "those of the labels weigh otherwise": (lambda x: F.cross_entropy(x, LABELS, **OTHERS), {-100}),
    "a weighted sum": (lambda x: F.cross_entropy(x, LABELS, ALL_BUT_3, reduction="sum"), {-100}),
    "other labels": (lambda x: F.cross_entropy(x, LABELS.roll(1).clamp(min=0), ignore_index=0), set()),
    "fewer": (lambda x: F.cross_entropy(x[:3], LABELS[:3], ignore_index=0), set()),
    "probabilities": (lambda x: F.cross_entropy(x, x.detach().softmax(-1)), set()),
}


def noted(compute):
    with ObserveLossCalls() as calls:
        loss = compute(torch.randn(6, 5, requires_grad=True))
    return calls.uncounted(loss, lambda: LABELS)


@pytest.mark.parametrize("name", CASES)
def test_labels_that_a_loss_leaves_out_or_weighs_otherwise_are_seen_where_it_is_of_those_labels(name):
    compute, expected = CASES[name]
    assert noted(compute) == expected


def test_what_the_loss_is_not_made_of_says_nothing():
    def with_metric(x):
        F.cross_entropy(x.detach(), LABELS.clamp(min=0), ALL_BUT_3, ignore_index=0)
        F.cross_entropy(x, LABELS.clamp(min=0), ALL_BUT_3, ignore_index=0)
        return F.cross_entropy(x, LABELS)

    assert noted(with_metric) == {-100}


def test_labels_are_not_made_where_no_loss_is_of_any():
    with ObserveLossCalls() as calls:
        loss = torch.randn(6, 5, requires_grad=True).softmax(-1).log().sum()
    assert calls.uncounted(loss, lambda: pytest.fail("made")) == set()
