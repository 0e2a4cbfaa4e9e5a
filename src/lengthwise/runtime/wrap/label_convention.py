"""The convention by which a model computes its loss from labels, learned from calls of it.

Most classes for causal language models predict label i + 1 from token i, so their users give each token its own label.
Some, such as BartForCausalLM, predict label i from token i: their users shift labels themselves. Of the first, many
take labels that are shifted already (``shift_labels``), which a shard needs, whose last target is on the next rank; for
the others the loss is made from the logits.

Modules of users are given the token after each token as its target, under whichever name; those that shift what they
get, as transformers models do, are given each token's own label.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.made_labels import MadeLabels
from lengthwise.runtime.wrap.missing_tensor import MissingTensor


@dataclass(frozen=True)
class LabelConvention:
    """Whether a model shifts labels itself, and whether it takes shifted ones."""

    shifts: bool = True
    """Whether the token before it predicts a label."""
    takes_shifted: bool = True
    """Whether it takes labels that are shifted already."""
    is_in_module: bool = False
    """Whether it is a user's own module that shifts labels, where others are given the token after each token."""
    made: MadeLabels | None = None
    """How the loss uses labels that ``inputs=`` makes; None: it makes none, or they make no difference."""
    are_read: bool = False
    """Whether anything asked for the labels of a micro-batch when its loss was compared."""


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits, as transformers computes it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


def loss_in(output: Any) -> Tensor | None:
    """Find the loss in the output of a forward; None if it is ambiguous."""
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    loss = getattr(output, "loss", None)
    if any(isinstance(part, MissingTensor) for part in (loss, *parts)):
        return MissingTensor()  # stands for one; Step.backward does not look at it
    scalars = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0]
    if isinstance(loss, Tensor):
        return loss
    return scalars[0] if len(scalars) == 1 else None
