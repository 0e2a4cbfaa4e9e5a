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


@dataclass(frozen=True)
class LabelConvention:
    """Whether a model shifts labels itself, and whether it takes shifted ones."""

    shifts: bool = True
    """Whether the token before it predicts a label."""
    takes_shifted: bool = True
    """Whether it takes labels that are shifted already."""
    is_in_module: bool = False
    """Whether it is a user's own module that shifts labels, where others are given the token after each token."""


def loss_of_logits(output: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy of an output's logits, as transformers computes it."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)
