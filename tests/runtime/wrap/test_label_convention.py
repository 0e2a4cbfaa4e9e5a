"""How a class of transformers makes its loss of labels is asked, not assumed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.runtime.verify.learn_labels import learn_labels
from lengthwise.runtime.wrap.label_convention import LabelConvention

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
LOGITS = torch.randn(1, 8, 10, generator=torch.Generator().manual_seed(0))


def mean(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def shifting(labels, shift_labels):
    return mean(LOGITS[:, :-1], labels[:, 1:]) if shift_labels is None else mean(LOGITS, shift_labels)


def shifting_once_more(labels, shift_labels):
    return mean(LOGITS[:, :-1], labels[:, 1:])


def shifting_without_the_argument(labels, shift_labels):
    if shift_labels is not None:
        raise TypeError("forward() got an unexpected keyword argument 'shift_labels'")
    return mean(LOGITS[:, :-1], labels[:, 1:])


def counting_nothing_as_zero(labels, shift_labels):
    return shifting_once_more(labels, shift_labels).nan_to_num(0.0)


def the_same_for_all_labels(labels, shift_labels):
    """As an untrained model's by chance, which does not know the argument."""
    return shifting_once_more(labels, None) * 0.0 + mean(torch.zeros(1, 7, 10), TOKENS[None, 1:])


def with_a_small_term(labels, shift_labels):
    return shifting_once_more(labels, None) * (1 + 5e-5)


def rounded(labels, shift_labels):
    return shifting_once_more(labels, shift_labels).bfloat16()


def not_shifting(labels, shift_labels):
    return mean(LOGITS, labels)


def of_its_own(labels, shift_labels):
    return shifting_once_more(labels, shift_labels) * (1.1 if shift_labels is None else 1.2)


def failing(labels, shift_labels):
    raise ValueError("no labels")


USUAL, FROM_LOGITS = LabelConvention(), LabelConvention(takes_shifted=False)


def asked(loss_of, **changes):
    wrapped_model = SimpleNamespace(uses_labels=True, objective=NEXT_TOKEN, plain=nullcontext, **changes)

    def model(input_ids, labels, shift_labels=None):
        return SimpleNamespace(loss=loss_of(labels, shift_labels), logits=LOGITS)

    return learn_labels(SimpleNamespace(wrapped_model=wrapped_model, model=model, gathered=nullcontext), TOKENS)


@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (shifting, USUAL),
        (shifting_once_more, FROM_LOGITS),
        (shifting_without_the_argument, FROM_LOGITS),
        (counting_nothing_as_zero, FROM_LOGITS),
        (rounded, FROM_LOGITS),
        (with_a_small_term, USUAL),
        (not_shifting, LabelConvention(shifts=False, takes_shifted=False)),
        (of_its_own, USUAL),
        (failing, USUAL),
    ],
)
def test_the_convention_is_what_the_losses_of_the_stock_model_say(loss_of, expected):
    assert asked(loss_of) == expected


def test_a_loss_that_all_labels_have_is_not_taken_for_one_of_shifted_labels(monkeypatch):
    monkeypatch.setitem(globals(), "LOGITS", torch.zeros(1, 8, 10))
    assert asked(the_same_for_all_labels) == FROM_LOGITS


def test_a_model_that_predicts_hidden_tokens_is_not_asked():
    wrapped_model = SimpleNamespace(uses_labels=True, objective=MASKED)
    assert learn_labels(SimpleNamespace(wrapped_model=wrapped_model), TOKENS) == USUAL
