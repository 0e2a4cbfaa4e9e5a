"""Models that say one thing of each sequence, whose labels lie at one slot of each and are given to the model alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.model_accessors import base_model, is_hugging_face

_OF_SEQUENCES = ("ForSequenceClassification", "ForNextSentencePrediction")
"""Ends of names of classes of transformers that classify each sequence."""


def classifies_sequences(model: nn.Module) -> bool:
    """Whether a model of transformers returns one row of logits for each sequence: a classifier, a reward model."""
    inner = base_model(model)
    return is_hugging_face(inner) and type(inner).__name__.endswith(_OF_SEQUENCES)


def with_label_of_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a sequence classifier to take labels [B, L], of which one a row is not ignored.

    Labels of tokens, such as those of a language model that it computes beside, are left out.
    """

    @wraps(forward)
    def call(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
        if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            of_rows = [row[row != IGNORE] for row in labels]
            labels = None if any(len(row) > 1 for row in of_rows) else torch.cat(of_rows)
        return forward(*args, **kwargs) if labels is None else forward(*args, labels=labels, **kwargs)

    return call
