"""Find out from calls of a transformers model how its loss uses labels."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.label_convention import LabelConvention, loss_of_logits

SAME = 1e-4
"""Relative difference of two losses that rounding explains, in float32 and above; in half precision 100 times that."""


def learn_labels(run: PreparedModel, tokens: Tensor) -> LabelConvention:
    """Determine a model's label convention from calls with one sequence of ``tokens`` [L] and different labels.

    A model that fails, or whose loss is none of these, is taken for the usual kind; the check before training decides.
    """
    usual, wrapped_model = LabelConvention(), run.wrapped_model
    if not wrapped_model.uses_labels or wrapped_model.objective != NEXT_TOKEN:
        return usual
    first = torch.full_like(tokens, IGNORE)
    first[0] = tokens[0]
    shifted = torch.cat([tokens[1:], first.new_full((1,), IGNORE)])
    with torch.no_grad(), wrapped_model.plain():
        try:
            alone = float(_call(run, tokens, first).loss)
            if alone == alone and alone != 0.0:  # the first label counts
                return LabelConvention(shifts=False, takes_shifted=False)
            expected = _call(run, tokens, tokens)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return usual
        try:
            taken = _call(run, tokens, shifted, shift_labels=shifted[None]).loss
        except (RuntimeError, TypeError, ValueError, IndexError):
            taken = None
    if taken is not None and _is_same(taken, expected.loss):
        return usual
    if _is_same(loss_of_logits(expected, shifted[None]), expected.loss):
        return replace(usual, takes_shifted=False)
    return usual


def _call(run: PreparedModel, tokens: Tensor, labels: Tensor, **options: Any) -> Any:
    with run.gathered():
        return run.model(input_ids=tokens[None], labels=labels[None], **options)


def _is_same(loss: Tensor, other: Tensor) -> bool:
    is_half = {loss.dtype, other.dtype} & {torch.bfloat16, torch.float16}
    same = SAME * (100.0 if is_half else 1.0)
    return bool((loss.double() - other.double()).abs() <= same * other.double().abs())
