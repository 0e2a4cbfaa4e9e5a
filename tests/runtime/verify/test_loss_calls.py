"""What calls of cross_entropy say of labels."""

import pytest
import torch
from torch.nn import functional as F

from lengthwise.runtime.verify.loss_calls import ObserveLossCalls

LOGITS, LABELS = torch.randn(6, 5), torch.tensor([1, 2, 0, 4, 3, -100])
CASES = {
    "as they are": (lambda: F.cross_entropy(LOGITS, LABELS), ({-100}, False)),
    "but the last": (lambda: F.cross_entropy(LOGITS[:-1], LABELS[:-1], ignore_index=0), ({0}, False)),
    "without a loss": (lambda: F.cross_entropy(LOGITS, LABELS.clamp(min=0), ignore_index=0), ({0}, False)),
    "of a module": (lambda: torch.nn.NLLLoss(ignore_index=-1)(LOGITS[:-1], LABELS[:-1]), ({-1}, False)),
    "weighed": (lambda: F.cross_entropy(LOGITS, LABELS, torch.arange(5.0)), ({-100}, True)),
    "weighed alike": (lambda: F.cross_entropy(LOGITS, LABELS, torch.full((5,), 2.0)), ({-100}, False)),
    "a weighed sum": (lambda: F.cross_entropy(LOGITS, LABELS, torch.arange(5.0), reduction="sum"), ({-100}, False)),
    "others": (lambda: F.cross_entropy(LOGITS, LABELS.roll(1).clamp(min=0), ignore_index=0), (set(), False)),
    "fewer": (lambda: F.cross_entropy(LOGITS[:3], LABELS[:3], ignore_index=0), (set(), False)),
    "probabilities": (lambda: F.cross_entropy(LOGITS, LOGITS.softmax(-1)), (set(), False)),
}


@pytest.mark.parametrize("name", CASES)
def test_labels_that_a_loss_leaves_out_or_weighs_are_seen_where_it_is_of_those_labels(name):
    compute, expected = CASES[name]
    with ObserveLossCalls() as calls:
        compute()
    assert calls.of(lambda: LABELS) == expected


def test_labels_are_not_made_where_no_loss_is_of_any():
    with ObserveLossCalls() as calls:
        LOGITS.softmax(-1).log().sum()
    assert calls.of(lambda: pytest.fail("made")) == (set(), False)
