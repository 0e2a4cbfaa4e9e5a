"""How a model of transformers makes its loss of labels, learned from calls of it as its user makes them.

Most classes for causal language models predict label i + 1 from token i, so their users give each token its own label.
Some, such as BartForCausalLM, predict label i from token i: their users shift labels themselves. Of the first, many
take labels that are shifted already (``shift_labels``), which a shard needs, whose last target is on the next rank; for
the others the loss is made from the logits.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.runtime.models.targets import IGNORE

if TYPE_CHECKING:
    from lengthwise.runtime.loop.run import Run

SAME = 1e-4
"""Relative difference of two losses that rounding explains, in float32 and above; in half precision 100 times that."""


@dataclass(frozen=True)
class LabelConvention:
    """What a model does with labels."""

    shifts: bool = True
    """Whether the token before it predicts a label."""
    takes_shifted: bool = True
    """Whether it takes labels that are shifted already."""


def learn_labels(run: "Run", tokens: Tensor) -> LabelConvention:
    """Ask the stock model, with one sequence of ``tokens`` [L] and labels of different kinds.

    A model that fails, or whose loss is none of these, is taken for the usual kind; the check before training decides.
    """
    usual, adapted = LabelConvention(), run.adapted
    if not adapted.uses_labels or adapted.objective != NEXT_TOKEN:
        return usual
    first = torch.full_like(tokens, IGNORE)
    first[0] = tokens[0]
    shifted = torch.cat([tokens[1:], first.new_full((1,), IGNORE)])
    with torch.no_grad(), run.plain():
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


def _call(run: "Run", tokens: Tensor, labels: Tensor, **options: Any) -> Any:
    return run.model(input_ids=tokens[None], labels=labels[None], **options)


def loss_of_logits(output: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy of an output's logits, as transformers computes it."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


def _is_same(loss: Tensor, other: Tensor) -> bool:
    is_half = {loss.dtype, other.dtype} & {torch.bfloat16, torch.float16}
    same = SAME * (100.0 if is_half else 1.0)
    return bool((loss.double() - other.double()).abs() <= same * other.double().abs())
